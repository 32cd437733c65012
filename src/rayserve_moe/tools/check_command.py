"""`rayserve-moe compile-check`: compiles a server's programs for a TPU topology and prints a report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rayserve_moe.config.given_files import GivenFileError, read_json_object
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.tools.compile_check import (
    COMPILER_ENVIRONMENT,
    CheckReport,
    Limits,
    check,
    estimator_of,
    use_host_alone,
)
from rayserve_moe.tools.estimate.dump import dump_environment
from rayserve_moe.tools.estimate.report import estimate_lines
from rayserve_moe.tools.presets import preset_names
from rayserve_moe.tools.program_report import ProgramReport
from rayserve_moe.tools.served_cases import NoTopologyError, ServedCase, case_of_config, case_of_model

DOES_NOT_FIT = 1
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
    "return_routed_experts": "enable_return_routed_experts",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_draft_model_path": "speculative_draft_model_path",
}
"""Options that set settings, with the settings' keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    names = ", ".join(preset_names())
    parser.add_argument("--config", help="a Serve config: its programs, on its topology or --topology")
    parser.add_argument("--model", default="", help=f"a directory with config.json, or one of {names}")
    parser.add_argument("--topology", default="", help="such as v6e:2x4, in the TPU compiler's spelling")
    parser.add_argument("--dp", type=int, default=0, help="data ranks (default: all devices / tp)")
    parser.add_argument("--tp", type=int, default=0, help="devices that share the heads (default: 1, or devices / dp)")
    parser.add_argument("--slices", type=int, help="number of slices of that topology (default: 1)")
    parser.add_argument("--redundant-experts", type=int, help="expert slots beyond one per expert, with rebalancing")
    parser.add_argument("--expert-backend", help="see the setting expert_backend")
    parser.add_argument("--expert-selection", help="see the setting expert_selection")
    parser.add_argument("--context", type=int, help="tokens per sequence (default: 4096)")
    parser.add_argument("--batch", type=int, help="sequences per data rank (default: 16)")
    parser.add_argument("--prefill-tokens", type=int, help="per data rank and step (default: 1024)")
    parser.add_argument("--page-size", type=int, help="tokens per KV page (default: 128)")
    parser.add_argument("--dtype", help="of weights, and of KV without --kv-cache-dtype (default: the model's)")
    parser.add_argument("--kv-cache-dtype", help="see the setting kv_cache_dtype")
    parser.add_argument("--expert-dtype", help="see the setting expert_dtype")
    parser.add_argument("--return-routed-experts", action="store_true", default=None, help="capture routing in steps")
    parser.add_argument("--speculative-algorithm", help="see the setting: verify steps and drafts")
    parser.add_argument("--speculative-draft-model-path", help="a directory with the config.json of a head")
    parser.add_argument("--layers", type=int, default=0, help="number of layers to compile (default: all)")
    parser.add_argument("--programs", default="", help="names of programs, separated by commas (default: all)")
    parser.add_argument("--limits", help="a JSON file with maximum values of report fields, by case and program")
    parser.add_argument("--estimate", action="store_true", help="estimate the time of each step from its schedules")
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled concurrently (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Compile and print the report; return 0, or 1 if a program does not fit, copies data or exceeds a limit."""
    if options.estimate and options.jobs > 1:
        raise ValueError("--estimate reads the schedules of one program at a time: remove --jobs")
    with tempfile.TemporaryDirectory(prefix="rayserve-moe-schedules-") as folder:
        return _check_dumping_to(Path(folder), options)


def _check_dumping_to(folder: Path, options: argparse.Namespace) -> int:
    set_environment_defaults(COMPILER_ENVIRONMENT | (dump_environment(folder) if options.estimate else {}))
    use_host_alone()
    try:
        case = _case(options)
    except NoTopologyError as skipped:
        sys.stderr.write(f"skipped: {skipped}\n")
        return 0
    limits = _limits(Path(options.limits)).get(case.name) if options.limits else None
    names = tuple(name.strip() for name in options.programs.split(",") if name.strip())
    estimator = estimator_of(case, dump=folder) if options.estimate else None
    report = check(case, names=names, limits=limits, num_threads=max(1, options.jobs), estimator=estimator)
    text = json.dumps(report.as_json(), indent=2) if options.json else render(report)
    sys.stdout.write(text + "\n")
    sys.stderr.writelines(f"{fault}\n" for fault in report.faults)
    return DOES_NOT_FIT if report.faults else 0


def _limits(file: Path) -> dict[str, Limits]:
    try:
        return read_json_object(file)
    except GivenFileError as error:
        raise ValueError(f"{file}: {error}") from error


def _case(options: argparse.Namespace) -> ServedCase:
    given = {name: value for name in SETTING_OF_OPTION if (value := getattr(options, name)) is not None}
    if options.config:
        of_model = [*given, *(name for name in ("dp", "tp") if getattr(options, name))]
        if of_model:
            raise ValueError(f"--{of_model[0].replace('_', '-')} requires --model: a config has its own settings")
        return case_of_config(options.config, topology=options.topology, model=options.model, num_layers=options.layers)
    if not (options.model and options.topology):
        raise ValueError("pass --config, or --model and --topology")
    values = {"max_model_len": DEFAULT_CONTEXT, **{SETTING_OF_OPTION[name]: value for name, value in given.items()}}
    values["enable_eplb"] = bool(options.redundant_experts)
    return case_of_model(
        options.model, options.topology, values=values, dp=options.dp, tp=options.tp, num_layers=options.layers
    )


GB = 1e9


def render(report: CheckReport) -> str:
    """Return the report as text: the settings, a paragraph per program, then faults. GB are 1e9 bytes, per device."""
    weights, pool = report.weights_bytes / GB, report.kv_pool_bytes / GB
    experts, cache = report.settings["experts"], report.settings["cache"]
    routing = "captured" if report.settings["replay"]["enabled"] else "not captured"
    lines = [
        f"{report.name}, {report.num_layers} layers, on {report.topology}: dp {report.dp} x tp {report.tp}",
        f"{report.num_expert_slots} expert slots, backend {experts['backend']}; routing {routing}",
        f"per device: weights {weights:.2f} GB, KV {pool:.2f} GB, {report.num_pages} pages of {cache['page_size']}",
    ]
    for program in report.programs:
        lines += ["", *_program_lines(program)]
    total = sum(program.seconds.lower_s + program.seconds.compile_s for program in report.programs)
    return "\n".join([*lines, "", f"{len(report.programs)} programs in {total:.0f} s", *report.faults])


def _program_lines(program: ProgramReport) -> Iterator[str]:
    memory = program.memory
    if memory is None:
        yield f"{program.name}: DOES NOT FIT"
        yield f"  {program.error}"
        return
    seconds, cycles = program.seconds, program.cycles
    compiled = f"{seconds.compile_s:.1f} s, of processors {seconds.compile_cpu_s:.1f} s"
    yield f"{program.name}: lowered in {seconds.lower_s:.1f} s, compiled in {compiled}"
    yield (
        f"  HBM: arguments {memory.arguments / GB:.2f}, temporaries {memory.temporaries / GB:.3f}, "
        f"peak {memory.peak / GB:.2f} of {memory.limit / GB:.2f} GB"
    )
    yield f"  updated in place: {'yes' if program.is_in_place else 'NO'}"
    copied = ", ".join(f"{kind} {num_bytes / GB:.3f} GB" for kind, num_bytes in program.copied_bytes.items())
    yield f"  copied: {copied or 'no weights, no KV'}"
    activations = program.activation_copies
    yield (
        f"  activations copied, loop bodies once: {len(activations)} x, {program.copied_activation_bytes / GB:.6f} GB, "
        f"{sum(copy.cycles for copy in activations):,} cycles"
    )
    for exchange in program.collectives:
        times = f"{'at least ' if exchange.is_least else ''}{exchange.times} x"
        size = f"{exchange.shape} ({exchange.num_bytes:,} bytes)"
        yield f"  {exchange.operation} over {exchange.group_size} devices: {times} {size}"
    for crossing in program.crossings:
        times = f"{'at least ' if crossing.is_least else ''}{crossing.times} x"
        yield f"  between slices, {crossing.transfer}: {times} {crossing.shape} ({crossing.num_bytes:,} bytes for each)"
    kernels = ", ".join(f"{times} x {name}" for name, times in program.kernels.items())
    yield f"  kernels: {kernels or 'none'}"
    yield f"  operations with a cost in a layer: {program.ops_per_layer}"
    yield (
        f"  XLA's own cycles {cycles.xla_cycles:,} (bodies once {cycles.xla_cycles_once:,}); "
        f"reading weights and KV once: {program.roofline_s * 1e3:.2f} ms"
    )
    if program.estimate:
        yield from estimate_lines(program.estimate)
