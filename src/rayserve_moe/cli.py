"""The command `rayserve-moe`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.rollouts import batch_job
from rayserve_moe.serving.start import command as start
from rayserve_moe.tools.check_table import render
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, check, estimator_of, use_host_alone
from rayserve_moe.tools.estimate.dump import dump_environment
from rayserve_moe.tools.presets import preset_names, read_config
from rayserve_moe.tools.step_programs import ServedSetting

DOES_NOT_FIT, WRONG_USE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for wrong use, others as the command has them.

    `compile-check` ends with 1 where something does not fit, `rollout` as `rollouts.batch_job` says, `serve` as
    `serving.start.supervisor` does.
    """
    parser = argparse.ArgumentParser(prog="rayserve-moe", description="Mixture-of-Experts models on TPU slices.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_compile_check(commands.add_parser("compile-check", help="compile a model's programs for a TPU topology"))
    rollout = commands.add_parser("rollout", help="sample the prompts of a file into Parquet shards")
    batch_job.add_arguments(rollout)
    start.add_arguments(commands.add_parser("serve", help="serve a config on this machine, until it is stopped"))
    options = parser.parse_args(arguments)
    run = {"compile-check": _compile_check, "rollout": batch_job.run, "serve": start.run}[options.command]
    try:
        return run(options)
    except ValueError as error:
        sys.stderr.write(f"rayserve-moe {options.command}: {error}\n")
        return WRONG_USE


def _add_compile_check(parser: argparse.ArgumentParser) -> None:
    default = ServedSetting("")
    names = ", ".join(preset_names())
    parser.add_argument("--model", required=True, help=f"a directory with config.json, or one of {names}")
    parser.add_argument("--topology", required=True, help="such as v6e:2x4, as the TPU compiler spells it")
    parser.add_argument("--dp", type=int, default=0, help="data ranks (default: all devices / tp)")
    parser.add_argument("--tp", type=int, default=0, help="devices that share the heads (default: 1, or devices / dp)")
    parser.add_argument("--redundant-experts", type=int, default=0, help="expert slots beyond one per expert")
    parser.add_argument("--expert-backend", default=default.expert_backend, help="as the setting expert_backend")
    parser.add_argument("--expert-selection", default=default.expert_selection, help="as the setting expert_selection")
    parser.add_argument("--context", type=int, default=default.context, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences per data rank")
    parser.add_argument("--prefill-tokens", type=int, default=default.prefill_tokens, help="per data rank and step")
    parser.add_argument("--page-size", type=int, default=default.page_size, help="tokens per KV page")
    parser.add_argument("--dtype", default=default.dtype, help="of the weights")
    parser.add_argument("--kv-dtype", default=default.kv_dtype, help="of the KV pool, such as float8_e4m3fn")
    parser.add_argument("--return-routed-experts", action="store_true", help="compile routing capture into the steps")
    parser.add_argument("--layers", type=int, default=0, help="only so many layers (default: all)")
    parser.add_argument("--programs", default="", help="names of programs, separated by commas (default: all)")
    parser.add_argument("--estimate", action="store_true", help="estimate the time of each step from its schedules")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _compile_check(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="rayserve-moe-schedules-") as folder:
        return _check_dumping_to(Path(folder), options)


def _check_dumping_to(folder: Path, options: argparse.Namespace) -> int:
    set_environment_defaults(COMPILER_ENVIRONMENT | (dump_environment(folder) if options.estimate else {}))
    use_host_alone()
    setting = ServedSetting(
        options.topology,
        dp=options.dp,
        tp=options.tp,
        redundant_experts=options.redundant_experts,
        expert_backend=options.expert_backend,
        context=options.context,
        batch=options.batch,
        prefill_tokens=options.prefill_tokens,
        page_size=options.page_size,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        capture_routing=options.return_routed_experts,
        expert_selection=options.expert_selection,
    )
    config = read_config(options.model, num_layers=options.layers)
    names = tuple(name.strip() for name in options.programs.split(",") if name.strip())
    estimator = estimator_of(read_config(options.model), setting, dump=folder) if options.estimate else None
    report = check(config, setting, model=Path(options.model).name, names=names, estimator=estimator)
    text = json.dumps(report.as_json(), indent=2) if options.json else render(report)
    sys.stdout.write(text + "\n")
    for program in report.programs:
        if program.error and options.json:
            sys.stderr.write(f"{program.name}: {program.error}\n")
    return 0 if report.fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
