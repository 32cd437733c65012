"""Command line of `rayserve-moe compile-check`, checked before the compiler is loaded."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rayserve_moe.config.load import settings_from_yaml
from rayserve_moe.config.model_names import model_fault, preset_names

DEFAULT_CONTEXT = 4096
SETTING_OF_OPTION = {
    "redundant_experts": "num_redundant_experts",
    "expert_backend": "expert_backend",
    "expert_selection": "expert_selection",
    "context": "max_model_len",
    "batch": "max_running_requests",
    "prefill_tokens": "max_step_tokens",
    "page_size": "page_size",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "slices": "num_slices",
    "expert_dtype": "expert_dtype",
    "expert_products": "expert_products",
    "return_routed_experts": "enable_return_routed_experts",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_draft_model_path": "speculative_draft_model_path",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "adapters_per_step": "adapters_per_step",
    "lora_experts": "lora_experts",
    "lora_shared_outer": "lora_shared_outer",
    "invariant_products": "invariant_products",
}
"""Options that set settings, with the settings' keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    what = parser.add_argument_group("what", "a config, or a model and a topology")
    what.add_argument("--config", help="a Serve config: its programs, on its topology or --topology")
    what.add_argument(
        "--model", default="", help=f"a directory with config.json, or one of {', '.join(preset_names())}"
    )
    what.add_argument("--layers", type=int, default=0, help="number of layers to compile (default: all)")
    what.add_argument("--programs", default="", help="names of programs, separated by commas (default: all)")
    where = parser.add_argument_group("where", "the slice that it is compiled for")
    where.add_argument(
        "--topology", default="", help="such as v6e:2x4, in the TPU compiler's spelling; or h200:1, a GPU and a number"
    )
    where.add_argument("--slices", type=int, help="number of slices of that topology (default: 1)")
    where.add_argument("--dp", type=int, default=0, help="data ranks (default: all devices / tp)")
    where.add_argument("--tp", type=int, default=0, help="devices that share the heads (default: 1, or devices / dp)")
    shapes = parser.add_argument_group("shapes and settings", "of a --model; a config has its own")
    shapes.add_argument("--context", type=int, help="tokens per sequence (default: 4096)")
    shapes.add_argument("--batch", type=int, help="sequences per data rank (default: 16)")
    shapes.add_argument("--prefill-tokens", type=int, help="per data rank and step (default: 1024)")
    shapes.add_argument("--page-size", type=int, help="tokens per KV page (default: 128, 16 for a GPU)")
    shapes.add_argument("--dtype", help="of weights, and of KV without --kv-cache-dtype (default: the model's)")
    shapes.add_argument("--kv-cache-dtype", help="see the setting kv_cache_dtype")
    shapes.add_argument("--expert-dtype", help="see the setting expert_dtype")
    shapes.add_argument("--expert-products", help="see the setting expert_products")
    shapes.add_argument("--expert-backend", help="see the setting expert_backend")
    shapes.add_argument("--expert-selection", help="see the setting expert_selection")
    shapes.add_argument("--redundant-experts", type=int, help="expert slots beyond one per expert, with rebalancing")
    shapes.add_argument("--return-routed-experts", action="store_true", default=None, help="capture routing in steps")
    shapes.add_argument("--speculative-algorithm", help="see the setting: verify steps and drafts")
    shapes.add_argument("--speculative-draft-model-path", help="a directory with the config.json of a head")
    shapes.add_argument("--max-loras", type=int, help="resident LoRA adapters: also the steps with adapters")
    shapes.add_argument("--max-lora-rank", type=int, help="see the setting max_lora_rank")
    shapes.add_argument("--adapters-per-step", type=int, help="see the setting adapters_per_step")
    shapes.add_argument("--lora-experts", action="store_true", default=None, help="see the setting lora_experts")
    shapes.add_argument(
        "--lora-shared-outer", action="store_true", default=None, help="see the setting lora_shared_outer"
    )
    shapes.add_argument("--invariant-products", help="see the setting invariant_products")
    report = parser.add_argument_group("report")
    report.add_argument("--limits", help="a JSON file with maximum values of report fields, by case and program")
    report.add_argument("--row-sums", action="store_true", help="list sums whose order differs between steps instead")
    report.add_argument("--estimate", action="store_true", help="estimate the time of each step from its schedules")
    report.add_argument("--jobs", type=int, default=1, help="programs compiled concurrently (default: 1)")
    report.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then compile; return the exit status of `check_command.run`.

    Raises: ValueError for arguments that contradict each other, and for a file or a model that does not exist.
    """
    if options.estimate and options.jobs > 1:
        raise ValueError("--estimate reads the schedules of one program at a time: remove --jobs")
    given = [name for name in (*SETTING_OF_OPTION, "dp", "tp") if getattr(options, name) not in (None, 0)]
    if options.config:
        settings_from_yaml(options.config, on_tpu=True)
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} requires --model: a config has its own settings")
    elif not (options.model and options.topology):
        raise ValueError("pass --config, or --model and --topology")
    if options.limits and not Path(options.limits).is_file():
        raise ValueError(f"--limits {options.limits}: no such file")
    is_of_gpu = options.topology.lower().startswith(("h100", "h200"))
    if is_of_gpu and (options.estimate or options.row_sums):
        raise ValueError("--estimate and --row-sums read what the TPU compiler writes: remove them for a GPU")
    check_model(options.model)
    sys.stderr.write("compile-check: loading the compiler\n")
    return importlib.import_module("rayserve_moe.tools.check_command").run(options)


def check_model(model: str) -> None:
    """Raise ValueError if a name is neither a model's nor that of a preset; empty is allowed."""
    if model and model not in preset_names() and model_fault(model):
        names = ", ".join(preset_names())
        raise ValueError(f"{model} is neither a preset ({names}) nor a directory with config.json")
