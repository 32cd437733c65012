"""The estimate of one compiled step of a served model, as numbers for a report."""

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
"""Ops of a layer that are printed; as JSON a report has all."""
MICROSECOND = 1e-6


@dataclass(frozen=True)
class NamedOp:
    """An op of a layer or of the rest of a step: all of its `times` executions there, microseconds with and without the
    overhead per op. `is_least`: a loop in it counts once for want of more.
    """

    name: str
    scope: str
    source: str
    times: float
    us: float
    bare_us: float
    bundles: float
    hbm_bytes: float
    link_us: float
    is_least: bool


@dataclass(frozen=True)
class EstimateReport:
    """The estimate of a step with `num_layers` layers, from schedules alone: nothing in it was measured.

    Fewer `compiled_layers` than that can be too few: what grows with the model (tables of experts, the KV pool) is as
    small as they are. Ops are sorted by what they cost, the largest first.
    `overhead_us` is what each op is charged beyond its work; no device has confirmed it, so every time is given without
    it too (`bare_seconds`). `share_of_roofline` has it in, `bare_share_of_roofline` has not.
    """

    num_layers: int
    compiled_layers: int
    overhead_us: float
    layer: Part
    step: Part
    roofline: Roofline
    bound: str
    share_of_roofline: float
    bare_share_of_roofline: float
    scopes: dict[str, Part]
    ops_in_layer: list[NamedOp]
    ops_outside: list[NamedOp]
    num_open_ops: int


@dataclass(frozen=True)
class Estimator:
    """Estimates steps of `model`, which is whole, as they are compiled with the schedules dumped to `dump`."""

    dump: DumpFolder
    model: ModelConfig
    sizes: StepSizes

    def estimate(self, program: ProgramText, *, prompt_tokens: int = 0, num_layers: int = 0) -> EstimateReport:
        """Estimate the step that was compiled last, of which `program` is the text.

        `prompt_tokens` are those per data rank beside the sequences; `num_layers` > 0 are what was compiled, where that
        are fewer than the model has. NoScheduleError where nothing was dumped; ValueError for a chip without figures,
        for several slices, and where the layers that are missing cannot be added (see `step_time.estimate`).
        """
        if self.model.plan.num_slices > 1:
            raise ValueError("steps over several slices are not estimated: no figure of the network between them")
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
    """The estimate as lines for a terminal: the step, what it is made of, and the ops that cost most of a layer."""
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
