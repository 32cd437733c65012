"""Command line of `rayserve-moe plan-slice`, checked before anything that takes long is loaded."""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import dataclass

from rayserve_moe.config.load import settings_from_yaml
from rayserve_moe.config.model_names import preset_names
from rayserve_moe.tools.check_options import check_model
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.plan_slice import made_up_options


@dataclass(frozen=True)
class Traffic:
    """The expected load."""

    prompt: int
    """Prompt tokens of a request."""
    output: int
    """Output tokens of a request."""
    concurrency: int
    """Concurrent requests."""

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a plan."""

    prefill_tokens: int = 1024
    """Prompt tokens of a data rank in a step."""
    kv_dtype: str = "bfloat16"
    expert_dtype: str = "auto"
    skew: float = 0.7
    """Standard deviation of the logarithm of experts' popularity; 0: all equally popular."""
    max_chips: int = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    given = Assumptions()
    parser.add_argument(
        "--model", default="", help=f"a directory with config.json, or one of {', '.join(preset_names())}"
    )
    parser.add_argument("--config", default="", help="a Serve config: its own settings, beside other candidates")
    parser.add_argument("--traffic", required=True, help="PROMPT/OUTPUT/CONCURRENCY: tokens, tokens, requests at once")
    parser.add_argument("--chips", default=",".join(CHIPS), help="generations, separated by commas (default: all)")
    parser.add_argument("--topology", default="", help="only this slice, such as v6e:2x4")
    parser.add_argument("--max-chips", type=int, default=given.max_chips, help="of a slice (default: 64)")
    parser.add_argument("--prefill-tokens", type=int, help="per data rank and step (default: 1024, or the config's)")
    parser.add_argument("--kv-cache-dtype", choices=("bfloat16", "fp8"), help="(default: bfloat16, or the config's)")
    parser.add_argument(
        "--expert-dtype", choices=("bfloat16", "int8", "fp8"), help="(default: bfloat16, or the config's)"
    )
    parser.add_argument("--skew", type=float, default=given.skew, help="of experts' popularity, 0: even (default: 0.7)")
    parser.add_argument("--top", type=int, default=2, help="splits shown per slice, the best first (default: 2)")
    parser.add_argument("--json", action="store_true", help="print all candidates as JSON")
    made_up_options.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then print the plan; return 0.

    Raises: ValueError for arguments that contradict each other, and for a file or a model that does not exist.
    """
    if not options.model and not options.config and not options.mixer:
        raise ValueError("pass --model, --config or --mixer")
    if options.mixer and (options.model or options.config):
        raise ValueError("--mixer names a model of its own: remove --model and --config")
    if options.config and (made_up_options.requested_sizes(options) or options.save_config):
        raise ValueError("a --config serves its own model: pass sizes with --model or --mixer")
    parse_traffic(options.traffic)
    if options.config:
        settings_from_yaml(options.config, on_tpu=True)
    check_model(options.model)
    made_up_options.requested_sizes(options)
    return importlib.import_module("rayserve_moe.tools.plan_slice.command").run(options)


def parse_traffic(text: str) -> Traffic:
    """Parse `PROMPT/OUTPUT/CONCURRENCY`. Raises ValueError unless it is three positive numbers."""
    if not re.fullmatch(r"[1-9]\d{0,8}(/[1-9]\d{0,8}){2}", text):
        raise ValueError(f"--traffic {text!r} is not PROMPT/OUTPUT/CONCURRENCY, such as 1024/512/256")
    return Traffic(*map(int, text.split("/")))
