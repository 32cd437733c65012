"""Command line and settings of the rollout job, checked before Ray and the tokenizer are loaded."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayserve_moe.config.load import settings_from_yaml

DEFAULT_NEW_TOKENS = 256
ANY_VERSION = "any"
RAY_SCRATCH = "runtime_resources"
"""Folder of a Ray session that holds the working directories of jobs."""


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job."""

    num_samples: int
    """Samples per prompt."""
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    returns_routing: bool = True
    returns_index: bool = False
    returns_gates: bool = False
    returns_mask: bool = False
    returns_drafts: bool = False
    weight_version: str | None = None
    """Weight version that samples must have; None: any."""
    retries_failed: bool = False
    """True if prompts that an earlier run gave up are retried."""
    in_flight: int = 256
    """Maximum number of concurrent samples."""
    shard_bytes: int = 64 * 2**20
    """A shard is written at this size."""
    flush_s: float = 20.0
    """A shard is written after this time."""
    give_up_s: float = 900.0
    """The job ends after this time without any answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the job."""
    default = JobSettings(1)
    add = parser.add_argument
    add("--prompts", type=Path, required=True, help="JSONL or Parquet: `text`, `messages` or `input_ids` per row")
    add(
        "--out",
        type=Path,
        required=True,
        help="directory of the shards, an absolute path; resumes an earlier run there",
    )
    add("--n", type=int, default=1, help="samples per prompt")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server; its key in RAYSERVE_MOE_API_KEY")
    where.add_argument("--config", type=Path, help="settings of engines to start in the job's Ray cluster")
    add("--replicas", type=int, default=0, help="engines to start (default: the number of free slices)")
    add(
        "--seed", type=int, default=default.seed, help="of the job; samples are determined by it and their prompts' ids"
    )
    add("--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS)
    add("--temperature", type=float, default=1.0)
    add("--sampling", default="{}", help="further sampling parameters, as a JSON object; rows override them")
    add("--no-routing", action="store_true", help="leave routed experts out")
    add("--index-rows", action="store_true", help="add index rows of sparse attention")
    add("--gates", action="store_true", help="add router gates, the weights of the routed experts")
    add("--masks", action="store_true", help="add sampling masks, and log-probs within them")
    add("--drafts", action="store_true", help="add which outputs were accepted drafts")
    add("--weight-version", default=ANY_VERSION, help="count and keep only samples of these weights")
    add("--retry-errors", action="store_true", help="retry prompts that an earlier run gave up")
    add("--resample-damaged", action="store_true", help="set damaged shards aside and sample their prompts again")
    add(
        "--place-experts",
        type=int,
        metavar="BATCH",
        default=0,
        help="once all is sampled, plan where experts lie from the routing, for steps of BATCH tokens, and move them",
    )
    add("--tokenizer", type=Path, help="the checkpoint's directory (default: the server's path)")
    add("--in-flight", type=int, default=0, help="samples in flight")
    add("--shard-mib", type=int, default=default.shard_bytes >> 20, help="samples in memory before a shard is written")
    add("--flush-s", type=float, default=default.flush_s, help="maximum time until a sample is on disk")
    add("--give-up-s", type=float, default=default.give_up_s, help="maximum time without any answer")


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then run the job; return its exit status.

    Raises: ValueError for wrong use.
    """
    check(options)
    return importlib.import_module("rayserve_moe.rollouts.batch_job").run(options)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for arguments out of range, and for files that do not exist or would be lost."""
    for name in ("n", "shard_mib", "flush_s", "give_up_s"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be greater than 0")
    if min(options.in_flight, options.replicas, options.place_experts) < 0:
        raise ValueError("--in-flight, --replicas and --place-experts must not be negative")
    if (options.index_rows or options.gates) and options.no_routing:
        raise ValueError("--no-routing excludes --index-rows and --gates")
    if options.place_experts and (not options.url or options.no_routing):
        raise ValueError("--place-experts needs a server by --url, and routing")
    try:
        json.loads(options.sampling)
    except ValueError as error:
        raise ValueError(f"--sampling is not JSON: {error}") from error
    _check_lasts(options.out)
    if not options.prompts.is_file():
        raise ValueError(f"--prompts {options.prompts}: no such file")
    if options.config:
        settings_from_yaml(options.config)


def _check_lasts(out: Path) -> None:
    """Raise ValueError for an output directory that a Ray job would lose: inside the copy of its working directory."""
    if not out.is_absolute():
        raise ValueError(
            f"--out {out} is relative: `ray job submit` runs the job in a copy of the working directory, which Ray "
            f'removes; give an absolute path, such as "$HOME/{out}"'
        )
    if RAY_SCRATCH in out.parts:
        raise ValueError(f"--out {out} lies in Ray's copy of a working directory, which Ray removes: give another path")
