"""The report of a compile check as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rayserve_moe.tools.compile_check import CheckReport
from rayserve_moe.tools.estimate.report import estimate_lines
from rayserve_moe.tools.program_report import ProgramReport

GB = 1e9


def render(report: CheckReport) -> str:
    """A few lines on the setting, then a paragraph per program, then what is wrong; GB are 1e9 bytes, per device."""
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
    total = sum(program.lower_s + program.compile_s for program in report.programs)
    return "\n".join([*lines, "", f"{len(report.programs)} programs in {total:.0f} s", *report.faults])


def _program_lines(program: ProgramReport) -> Iterator[str]:
    memory = program.memory
    if memory is None:
        yield f"{program.name}: DOES NOT FIT"
        yield f"  {program.error}"
        return
    seconds = f"{program.compile_s:.1f} s, of processors {program.compile_cpu_s:.1f} s"
    yield f"{program.name}: lowered in {program.lower_s:.1f} s, compiled in {seconds}"
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
        f"  XLA's own cycles {program.xla_cycles:,} (bodies once {program.xla_cycles_once:,}); "
        f"reading weights and KV once: {program.roofline_s * 1e3:.2f} ms"
    )
    if program.estimate:
        yield from estimate_lines(program.estimate)
