"""The report of a compile check as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rayserve_moe.tools.compile_check import CheckReport, ProgramReport
from rayserve_moe.tools.estimate.report import estimate_lines

GB = 1e9


def render(report: CheckReport) -> str:
    """A few lines on the setting, then a paragraph per program; GB are 1e9 bytes, per device."""
    setting = report.setting
    weights, pool = report.weights_bytes / GB, report.kv_pool_bytes / GB
    sequences = f"{setting.batch} sequences x {setting.context} tokens per data rank"
    lines = [
        f"{report.model}, {report.num_layers} layers, on {setting.topology}: dp {report.dp} x tp {report.tp}",
        f"{report.num_expert_slots} expert slots, backend {setting.expert_backend}; {setting.dtype}, {sequences}",
        f"per device: weights {weights:.2f} GB, KV pool {pool:.2f} GB of {setting.kv_dtype}",
    ]
    for program in report.programs:
        lines += ["", *_program_lines(program)]
    return "\n".join(lines)


def _program_lines(program: ProgramReport) -> Iterator[str]:
    memory = program.memory
    if memory is None:
        yield f"{program.name}: DOES NOT FIT"
        yield f"  {program.error}"
        return
    yield f"{program.name}: lowered in {program.lower_s:.1f} s, compiled in {program.compile_s:.1f} s"
    yield (
        f"  HBM: arguments {memory.arguments / GB:.2f}, temporaries {memory.temporaries / GB:.3f}, "
        f"peak {memory.peak / GB:.2f} of {memory.limit / GB:.2f} GB"
    )
    yield f"  updated in place: {'yes' if program.is_in_place else 'NO'}"
    copied = ", ".join(f"{kind} {num_bytes / GB:.3f} GB" for kind, num_bytes in program.copied_bytes.items())
    yield f"  copied: {copied or 'no weights, no KV'}"
    for exchange in program.collectives:
        times = f"{'at least ' if exchange.is_least else ''}{exchange.times} x"
        size = f"{exchange.shape} ({exchange.num_bytes:,} bytes)"
        yield f"  {exchange.operation} over {exchange.group_size} devices: {times} {size}"
    kernels = ", ".join(f"{times} x {name}" for name, times in program.kernels.items())
    yield f"  kernels: {kernels or 'none'}"
    yield (
        f"  XLA's own cycles {program.xla_cycles:,} (bodies once {program.xla_cycles_once:,}); "
        f"reading weights and KV once: {program.roofline_s * 1e3:.2f} ms"
    )
    if program.estimate:
        yield from estimate_lines(program.estimate)
