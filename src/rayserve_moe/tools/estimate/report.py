"""The estimate of a compiled step of a served model, as numbers for a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.tools.estimate.chips import OVERHEAD_S, chip_of
from rayserve_moe.tools.estimate.dump import DumpFolder, Schedules
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.program_ops import ProgramReader
from rayserve_moe.tools.estimate.step_time import OpTime, Part, Roofline, estimate
from rayserve_moe.tools.estimate.workload import StepSizes, step_work
from rayserve_moe.tools.hlo_text import ProgramText

NUM_NAMED = 10
"""Maximum printed ops of a layer; the JSON report has all."""
MICROSECOND = 1e-6


@dataclass(frozen=True)
class NamedOp:
    """An op of a layer or of the rest of a step, summed over its executions there."""

    name: str
    scope: str
    source: str
    times: float
    """Number of executions."""
    us: float
    """Microseconds with the overhead per op."""
    bare_us: float
    """Microseconds without the overhead."""
    bundles: float
    hbm_bytes: float
    link_us: float
    is_least: bool
    """True if a loop with unknown trips was counted once."""


@dataclass(frozen=True)
class EstimateReport:
    """The estimate of a step, from schedules alone: nothing in it was measured.

    No device has confirmed the overhead per op, so every time is also given without it.
    """

    num_layers: int
    """Layers of the estimated step."""
    compiled_layers: int
    """Layers that were compiled. With fewer, arrays that grow with the model (expert tables, KV pool) are too small."""
    overhead_us: float
    """Charge per op beyond its work."""
    layer: Part
    step: Part
    roofline: Roofline
    bound: str
    share_of_roofline: float
    """With the overhead."""
    bare_share_of_roofline: float
    """Without the overhead."""
    scopes: dict[str, Part]
    ops_in_layer: list[NamedOp]
    """By cost, most expensive first."""
    ops_outside: list[NamedOp]
    """By cost, most expensive first."""
    num_open_ops: int
    """Ops with a loop of unknown trips."""


@dataclass(frozen=True)
class Estimator:
    """Estimates compiled steps of a model from their dumped schedules."""

    dump: DumpFolder
    model: ModelConfig
    """The whole model."""
    sizes: StepSizes

    def estimate(self, program: ProgramText, *, prompt_tokens: int = 0, num_layers: int = 0) -> EstimateReport:
        """Estimate the step that was compiled last; `program` is its text.

        `prompt_tokens` are per data rank, besides the sequences. `num_layers` > 0 is the number of compiled layers if
        fewer than the model's. Raises NoScheduleError if nothing was dumped; ValueError for a chip without figures, for
        several slices, and if missing layers cannot be added (see `step_time.estimate`).
        """
        if self.model.plan.num_slices > 1:
            raise ValueError("steps over several slices cannot be estimated: the network between them has no figure")
        chip, work = chip_of(self.sizes.topology), step_work(self.model, self.sizes, prompt_tokens=prompt_tokens)
        place = Slice(chip, tuple(tuple(device.coords) for device in self.model.plan.mesh.devices.flat))
        tree = ProgramReader(program, Schedules(program, self.dump.take()), place, work).tree()
        whole = self.model.spec.num_layers
        found = estimate(tree, chip=chip, work=work, missing_layers=whole - (num_layers or whole))
        return EstimateReport(
            whole,
            num_layers or whole,
            OVERHEAD_S / MICROSECOND,
            found.layer,
            found.step,
            found.roofline,
            found.roofline.bound,
            found.roofline.seconds / found.step.seconds,
            found.roofline.seconds / found.step.bare_seconds,
            found.by_scope(),
            [_named(one) for one in found.by_cost()],
            [_named(one) for one in found.by_cost(in_layer=False)],
            len(found.open_ops),
        )


def estimate_lines(report: EstimateReport) -> Iterator[str]:
    """Yield the estimate as lines for a terminal: the step, its parts, and the most expensive ops of a layer."""
    step, layer, roofline = report.step, report.layer, asdict(report.roofline)
    bounds = ", ".join(f"{name.removesuffix('_s')} {seconds * 1e3:.2f}" for name, seconds in roofline.items())
    yield (
        f"  ESTIMATED from schedules, not measured; each op {report.overhead_us:.1f} us beyond its work, which no "
        "device has confirmed (in brackets: without it)"
    )
    few = f" ({report.compiled_layers} compiled)" if report.compiled_layers < report.num_layers else ""
    share = f"{report.share_of_roofline:.0%} ({report.bare_share_of_roofline:.0%})"
    yield (
        f"    step of {report.num_layers} layers{few} {step.seconds * 1e3:.2f} ({step.bare_seconds * 1e3:.2f}) ms; "
        f"roofline {report.roofline.seconds * 1e3:.2f} ms, {share} of it reached; {bounds} ms"
    )
    yield (
        f"    layer {layer.seconds * 1e6:.1f} ({layer.bare_seconds * 1e6:.1f}) us: {layer.num_ops:.0f} ops, "
        f"{layer.small_ops:.0f} of them small, {layer.bundles:,.0f} bundles, {layer.hbm_bytes / 1e6:.1f} MB of HBM, "
        f"links {layer.link_s * 1e6:.1f} us"
    )
    for one in report.ops_in_layer[:NUM_NAMED]:
        at_least = ", at least" if one.is_least else ""
        yield (
            f"      {one.us:8.1f} ({one.bare_us:.1f}) us  {one.scope or '-'}: {one.times:.0f} x {one.name}, "
            f"{one.bundles:,.0f} bundles, {one.hbm_bytes / 1e6:.2f} MB{at_least}"
        )


def _named(one: OpTime) -> NamedOp:
    op, times = one.op, one.times
    return NamedOp(
        op.name,
        op.scope,
        op.source,
        times,
        one.seconds * times / MICROSECOND,
        one.bare_seconds * times / MICROSECOND,
        op.bundles * times,
        op.hbm_bytes * times,
        op.link_s * times / MICROSECOND,
        op.is_least,
    )
