"""The estimate of a compiled step of a served model, as numbers for a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.tools.estimate.chips import chip_of
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
    """Calibrated microseconds."""
    peak_us: float
    """Microseconds at the peaks of the specification."""
    kind: str
    """Kind of op, whose spread the ranges have (`rates.SPREADS`)."""
    bundles: float
    hbm_bytes: float
    link_us: float
    is_least: bool
    """True if a loop with unknown trips was counted once."""


@dataclass(frozen=True)
class EstimateReport:
    """The estimate of a step, from schedules and the rates that published device times support.

    Nothing in it was measured on this system.
    """

    num_layers: int
    """Layers of the estimated step."""
    compiled_layers: int
    """Layers that were compiled. With fewer, arrays that grow with the model (expert tables, KV pool) are too small."""
    layer: Part
    step: Part
    roofline: Roofline
    bound: str
    share_of_roofline: float
    """Bound of the hardware / calibrated time."""
    share_of_matrix_peak: float
    """Operations over the peak of the matrix units / calibrated time."""
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
        schedules = Schedules(program, self.dump.take())
        return self.of_schedules(program, schedules, prompt_tokens=prompt_tokens, num_layers=num_layers)

    def of_schedules(
        self, program: ProgramText, schedules: Schedules, *, prompt_tokens: int = 0, num_layers: int = 0
    ) -> EstimateReport:
        """Compute `estimate` from a program's schedules, which may have other sizes than `sizes` but for its shapes."""
        if self.model.plan.num_slices > 1:
            raise ValueError("steps over several slices cannot be estimated: the network between them has no figure")
        chip, work = chip_of(self.sizes.topology), step_work(self.model, self.sizes, prompt_tokens=prompt_tokens)
        place = Slice(chip, tuple(tuple(device.coords) for device in self.model.plan.mesh.devices.flat))
        whole = self.model.spec.num_layers
        with_experts = sum(layer < (num_layers or whole) for layer in self.model.spec.moe_layer_ids)
        tree = ProgramReader(program, schedules, place, work, with_experts).tree()
        everywhere = [list(range(len(place.devices)))]
        min_link_s = place.seconds("all-to-all", round(work.exchanged_bytes), groups=everywhere)
        missing = whole - (num_layers or whole)
        found = estimate(tree, chip=chip, work=work, min_link_s=min_link_s, missing_layers=missing)
        return EstimateReport(
            whole,
            num_layers or whole,
            found.layer,
            found.step,
            found.roofline,
            found.roofline.bound,
            found.share_of_roofline,
            found.roofline.flops_s / found.step.seconds,
            found.by_scope(),
            [_named(one) for one in found.by_cost()],
            [_named(one) for one in found.by_cost(in_layer=False)],
            len(found.open_ops),
        )


CALIBRATED = (
    "ESTIMATED, not measured: from schedules, at rates that published device times of other kernels support; the range "
    "is their spread"
)


def estimate_lines(report: EstimateReport) -> Iterator[str]:
    """Yield the estimate as lines for a terminal: the step, its parts, and the most expensive ops of a layer."""
    step, layer, roofline = report.step, report.layer, asdict(report.roofline)
    bounds = ", ".join(f"{name.removesuffix('_s')} {seconds * 1e3:.2f}" for name, seconds in roofline.items())
    yield f"  {CALIBRATED}"
    few = f" ({report.compiled_layers} compiled)" if report.compiled_layers < report.num_layers else ""
    yield (
        f"    step of {report.num_layers} layers{few} {step.seconds * 1e3:.2f} ms ({step.min_seconds * 1e3:.2f} to "
        f"{step.max_seconds * 1e3:.2f}); at the peaks of the chip {step.peak_seconds * 1e3:.2f} ms"
    )
    yield (
        f"    bound of the hardware {report.roofline.seconds * 1e3:.2f} ms, {report.share_of_roofline:.0%} of it "
        f"reached ({bounds} ms); {report.share_of_matrix_peak:.0%} of the matrix peak"
    )
    yield (
        f"    layer {layer.seconds * 1e6:.1f} us ({layer.min_seconds * 1e6:.1f} to {layer.max_seconds * 1e6:.1f}): "
        f"{layer.num_ops:.0f} ops, {layer.small_ops:.0f} of them small, {layer.bundles:,.0f} bundles, "
        f"{layer.hbm_bytes / 1e6:.1f} MB of HBM, links {layer.link_s * 1e6:.1f} us"
    )
    for one in report.ops_in_layer[:NUM_NAMED]:
        at_least = ", at least" if one.is_least else ""
        yield (
            f"      {one.us:8.1f} us (at peak {one.peak_us:.1f})  {one.scope or '-'}: {one.times:.0f} x {one.name}, "
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
        one.peak_seconds * times / MICROSECOND,
        one.kind,
        op.bundles * times,
        op.hbm_bytes * times,
        op.link_s * times / MICROSECOND,
        op.is_least,
    )
