"""Command line of `rayserve-moe audit`, checked before the shards are read."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path

MAX_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("shards", type=Path, help="directory of a rollout job, or a single shard, with routing")
    add("--server", required=True, metavar="URL", help="a server with enable_audit; its key in RAYSERVE_MOE_API_KEY")
    add("--weight-version", default="", help="samples of these weights (default: all, which must be the served ones)")
    add("--max-samples", type=int, default=0, help="samples to audit, at even distances (default: all)")
    add("--batch", type=int, default=32, help=f"samples of a request, at most {MAX_BATCH}")
    add("--tie-tolerance", type=float, default=0.05, help="margin of experts that rounding explains, in logits")
    add("--logprob-tolerance", type=float, default=0.05, help="difference of log-probs that rounding explains, in nats")
    add("--no-logprobs", action="store_true", help="audit rows only, such as of samples at another temperature than 1")
    add("--gates", action="store_true", help="force the samples' gates too; the server returns gates")
    add("--out", type=Path, help="file for the report of every sample, as JSON")
    add("--plot", type=Path, help="file for a chart of the differing decisions, as SVG")


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then audit; return 0 if all samples pass and 1 otherwise.

    Raises: ValueError for wrong use.
    """
    if not 1 <= options.batch <= MAX_BATCH:
        raise ValueError(f"--batch must be from 1 to {MAX_BATCH}")
    if options.max_samples < 0:
        raise ValueError("--max-samples must not be negative")
    for name in ("tie_tolerance", "logprob_tolerance"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--{name.replace('_', '-')} must be a number that is not negative")
    for name in ("out", "plot"):
        file = getattr(options, name)
        if file and not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: {file.parent} is not a directory")
    return importlib.import_module("rayserve_moe.rollouts.audit").run(options)
