"""The work of `rayserve-moe compile-check`: compiles a server's programs for a TPU topology and prints a report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rayserve_moe.config.given_files import GivenFileError, read_json_object
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.execution.tpu_invariance import unsupported_reason
from rayserve_moe.tools.check_options import DEFAULT_CONTEXT, SETTING_OF_OPTION
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
from rayserve_moe.tools.program_report import ProgramReport
from rayserve_moe.tools.row_sums import differences
from rayserve_moe.tools.served_cases import NoTopologyError, ServedCase, case_of_config, case_of_model, lay_out

DOES_NOT_FIT = DIFFERS = 1


def run(options: argparse.Namespace) -> int:
    """Compile and print the report; return 0, or 1 if a program does not fit, copies data or exceeds a limit."""
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
    if options.row_sums:
        return _compare_sums(case, names=_names(options))
    limits = _limits(Path(options.limits)).get(case.name) if options.limits else None
    estimator = estimator_of(case, dump=folder) if options.estimate else None
    threads = max(1, options.jobs)
    report = check(case, names=_names(options), limits=limits, num_threads=threads, estimator=estimator, say=_say)
    text = json.dumps(report.as_json(), indent=2) if options.json else render(report)
    sys.stdout.write(text + "\n")
    sys.stderr.writelines(f"{fault}\n" for fault in report.faults)
    return DOES_NOT_FIT if report.faults else 0


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name.strip() for name in options.programs.split(",") if name.strip())


def _compare_sums(case: ServedCase, *, names: tuple[str, ...]) -> int:
    """Print where a row could be added up in two orders; return 0, or 1 if there is such a line."""
    _say(f"tracing and compiling the steps of {case.name}")
    served = lay_out(case)
    if reason := unsupported_reason(served):
        sys.stdout.write(f"a server refuses invariant_products on: {reason}\n")
    found = differences(served, names=names)
    sys.stdout.writelines(f"{each}\n" for each in found)
    sys.stdout.write(f"{case.name} on {case.topology}: {len(found)} sums differ between steps\n")
    return DIFFERS if found else 0


def _say(line: str) -> None:
    """Write a line of progress, also while a report is written to a file."""
    sys.stderr.write(f"compile-check: {line}\n")
    sys.stderr.flush()


def _limits(file: Path) -> dict[str, Limits]:
    try:
        return read_json_object(file)
    except GivenFileError as error:
        raise ValueError(f"{file}: {error}") from error


def _case(options: argparse.Namespace) -> ServedCase:
    given = {name: value for name in SETTING_OF_OPTION if (value := getattr(options, name)) is not None}
    if options.config:
        return case_of_config(options.config, topology=options.topology, model=options.model, num_layers=options.layers)
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
