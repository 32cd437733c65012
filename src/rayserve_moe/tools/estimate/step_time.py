"""The step-time estimate: a formula over a program's ops, next to the bound of the hardware on the step's work.

An op costs the maximum of its bundles, its matrix instructions, its HBM bytes and its link bytes, each over a rate, and
an overhead; kernels also wait (`OpPrice`). It is priced twice: at the peaks of the specification, and at the rates that
published device times support (`rates`), with the spread of its kind. An asynchronous op costs only the time that the
ops since its start do not hide. A loop's body counts with its trips; a conditional counts its cheapest branch, but in a
loop over blocks of experts' rows its most expensive one. Nothing here was measured: no contention, no launch of a
program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip
from rayserve_moe.tools.estimate.program_ops import Block, Branches, Loop, Op
from rayserve_moe.tools.estimate.rates import (
    AT_PEAK,
    ATTENTION,
    COLLECTIVE,
    COPY,
    KERNEL,
    PRODUCT,
    PROMPT_ATTENTION,
    SPREADS,
    STRIDED_ATTENTION,
    Rates,
    calibrated,
)
from rayserve_moe.tools.estimate.step_work import StepWork

SMALL_S = 1e-6
"""Work below which an op is small: the overhead is most of its cost."""


@dataclass(frozen=True)
class OpTime:
    """An op with its cost."""

    op: Op
    times: float
    """Number of executions."""
    in_layer: bool
    seconds: float
    """Calibrated seconds of an execution."""
    peak_seconds: float
    """Seconds of an execution at the peaks of the specification, with the overhead."""
    kind: str
    """Kind of op whose spread holds (`rates.SPREADS`)."""


@dataclass(frozen=True)
class Part:
    """Totals of the ops of a layer or of a step."""

    num_ops: float = 0
    small_ops: float = 0
    """Ops with less than `SMALL_S` of work."""
    bundles: float = 0
    hbm_bytes: float = 0
    link_s: float = 0
    seconds: float = 0
    """Calibrated."""
    min_seconds: float = 0
    max_seconds: float = 0
    """With `min_seconds` the range that published device times leave."""
    peak_seconds: float = 0
    """At the peaks of the specification, with the overhead."""


@dataclass(frozen=True)
class Roofline:
    """The minimum time of a step's work on the hardware, in seconds, by bound.

    Operations over the peak of the matrix units, HBM bytes over the peak bandwidth, and the rows of the experts over
    the links, whatever exchange moves them.
    """

    flops_s: float
    hbm_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        return max(self.flops_s, self.hbm_s, self.link_s)

    @property
    def bound(self) -> str:
        return max(("flops", "hbm", "link"), key=lambda kind: getattr(self, f"{kind}_s"))


@dataclass(frozen=True)
class Estimate:
    """The estimate of a program: a layer, a whole step, and the ops of both."""

    layer: Part
    step: Part
    roofline: Roofline
    ops: tuple[OpTime, ...]
    open_ops: tuple[str, ...]
    """Names of ops with a loop that was counted once because its trips are unknown."""

    @property
    def share_of_roofline(self) -> float:
        """Return the roofline over the estimate: 1 if nothing is lost."""
        return self.roofline.seconds / self.step.seconds if self.step.seconds else 0.0

    def by_cost(self, *, in_layer: bool = True) -> list[OpTime]:
        """Return the ops of a layer, or outside the layers, most expensive first."""
        ops = [one for one in self.ops if one.in_layer == in_layer]
        return sorted(ops, key=lambda one: -one.seconds * one.times)

    def by_scope(self) -> dict[str, Part]:
        """Return the cost of each named scope of a layer."""
        scopes = dict.fromkeys(one.op.scope for one in self.ops if one.in_layer)
        return {scope: _sum(one for one in self.ops if one.in_layer and one.op.scope == scope) for scope in scopes}


def estimate(tree: Block, *, chip: Chip, work: StepWork, min_link_s: float = 0.0, missing_layers: int = 0) -> Estimate:
    """Price a program's tree for `chip`, with `missing_layers` more than it was compiled with.

    `min_link_s` is the minimum time of the step's rows on the links.

    Layers are the trips of loops over layers; with several such loops, a layer is the average. Raises ValueError if
    layers are missing and the program does not have exactly one such loop.
    """
    loops = [item for item in tree.items if isinstance(item, Loop) and item.is_layers]
    compiled = sum(loop.trips for loop in loops)
    if missing_layers and len(loops) != 1:
        raise ValueError(f"adding {missing_layers} layers requires one loop over layers, the program has {len(loops)}")
    ops = tuple(Pricing(chip, calibrated(chip)).ops(tree))
    outside = _sum(one for one in ops if not one.in_layer)
    layer = _sum(one for one in ops if one.in_layer)
    step = _added(outside, _scaled(layer, compiled + missing_layers))
    roofline = Roofline(work.flops / chip.device_flops, work.hbm_bytes / chip.device_hbm_bytes, min_link_s)
    return Estimate(layer, step, roofline, ops, tuple(sorted({one.op.name for one in ops if one.op.is_least})))


WAITS_OF_A_VISIT = {KERNEL: 1, ATTENTION: 2}
"""Copies that a visit of a kernel waits for one after the other."""


@dataclass(frozen=True)
class OpPrice:
    """The formula for an op on a chip at given rates."""

    op: Op
    chip: Chip
    rates: Rates

    @property
    def core_s(self) -> float:
        """Return the seconds of the core's bundles, without those before the first copy if these are added."""
        stalls = {PROMPT_ATTENTION: self.rates.prompt_stall, STRIDED_ATTENTION: self.rates.strided_stall}
        stall = stalls.get(self.op.kind, 1.0)
        lead = self.op.lead_bundles if self.rates.adds_ends else 0.0
        return (self.op.bundles - lead) * stall / self.chip.clock_hz

    @property
    def matrix_s(self) -> float:
        """Return the seconds of the matrix units; 0 if bundles alone count."""
        cycles = self.op.matrix_ops * self.chip.matrix_cycles / self.chip.matrix_units
        return cycles / self.chip.clock_hz / self.rates.matrix_share if self.rates.matrix_share else 0.0

    @property
    def hbm_s(self) -> float:
        return self.op.hbm_bytes * self.op.idle_factor / (self.chip.device_hbm_bytes * self.rates.hbm_share)

    @property
    def kind(self) -> str:
        """Return the op's kind; ops that the matrix units bound are products."""
        is_product = self.op.kind in (COPY, KERNEL) and self.matrix_s > max(self.core_s, self.hbm_s)
        return PRODUCT if is_product else self.op.kind

    @property
    def seconds(self) -> float:
        """Return the seconds of an execution without the overhead.

        A visit of a kernel takes the time of its code, or of its copy with the latency; copies in flight share the
        latency. Decode attention waits for the pages of a sequence before it computes, and hides only a part of either.
        A collective has its latency as its overhead.
        """
        op, core_s = self.op, max(self.core_s, self.matrix_s)
        waits_s = WAITS_OF_A_VISIT.get(op.kind, 0) * op.visits / op.num_ahead * self.rates.wait_s
        if op.kind == ATTENTION:
            busy_s = max(core_s, self.hbm_s) + self.rates.exposed_share * min(core_s, self.hbm_s) + waits_s
        else:
            busy_s = max(core_s, self.hbm_s + waits_s if self.hbm_s else 0.0)
        return max(busy_s, op.link_s) + self._ends_s

    @property
    def overhead_s(self) -> float:
        return self.rates.collective_s if self.op.kind == COLLECTIVE and self.op.num_peers > 2 else OVERHEAD_S

    @property
    def _ends_s(self) -> float:
        """Return the seconds of a kernel before its first copy, and of the visit that no other visit hides."""
        op = self.op
        if not self.rates.adds_ends or op.kind in (COPY, COLLECTIVE):
            return 0.0
        visit_s = min(max(self.core_s, self.matrix_s), self.hbm_s) / max(1.0, op.visits)
        return op.lead_bundles / self.chip.clock_hz + op.num_waits * self.rates.wait_s + visit_s


@dataclass(frozen=True)
class Pricing:
    """The formula for the ops of a program on a chip."""

    chip: Chip
    rates: Rates

    def ops(self, block: Block, *, times: float = 1.0, in_layer: bool = False) -> Iterator[OpTime]:
        """Yield all ops of a block with their costs; ops in loops over layers with their executions per layer."""
        found, at_peak = self.costs(block), Pricing(self.chip, AT_PEAK).costs(block)
        for item, seconds, peak_seconds in zip(block.items, found, at_peak, strict=True):
            match item:
                case Op():
                    kind = OpPrice(item, self.chip, self.rates).kind
                    yield OpTime(item, times, in_layer, seconds, peak_seconds, kind)
                case Loop() if item.is_layers and not in_layer:
                    layers = sum(one.trips for one in block.items if isinstance(one, Loop) and one.is_layers)
                    yield from self.ops(item.body, times=item.trips / layers, in_layer=True)
                case Loop():
                    yield from self.ops(item.body, times=times * item.trips, in_layer=in_layer)
                case Branches():
                    yield from self.ops(self._chosen(item), times=times, in_layer=in_layer)

    def costs(self, block: Block) -> list[float]:
        """Return the seconds of each item of a block."""
        seconds: list[float] = []
        for item in block.items:
            match item:
                case Op():
                    seconds.append(self._of_op(item, block, seconds))
                case Loop():
                    seconds.append(sum(self.costs(item.body)) * item.trips)
                case Branches():
                    seconds.append(sum(self.costs(self._chosen(item))))
        return seconds

    def _of_op(self, op: Op, block: Block, before: list[float]) -> float:
        price = OpPrice(op, self.chip, self.rates)
        seconds = price.seconds + price.overhead_s
        if op.starts_at < 0:
            return seconds
        items = block.items[op.starts_at :]
        hidden = sum(
            self._leaves_free(item, cost, op) for item, cost in zip(items, before[op.starts_at :], strict=False)
        )
        return max(0.0, seconds - hidden)

    def _leaves_free(self, item: Op | Loop | Branches, cost: float, op: Op) -> float:
        """Return how long an item leaves free the resource that `op` needs: links, or HBM.

        Negative if the item used the links beside other items, because exchanges share the links.
        """
        if not isinstance(item, Op):
            return 0.0
        if op.link_s and item.link_s and item.starts_at >= 0:
            return min(0.0, cost - item.link_s)
        taken = item.link_s if op.link_s else OpPrice(item, self.chip, self.rates).hbm_s
        return max(0.0, cost - taken)

    def _chosen(self, branches: Branches) -> Block:
        choose = max if branches.is_dearest else min
        return choose(branches.options, key=lambda option: sum(self.costs(option)), default=Block())


def _sum(ops: Iterator[OpTime]) -> Part:
    total: defaultdict[str, float] = defaultdict(float)
    for one in ops:
        seconds, spread = one.seconds * one.times, SPREADS[one.kind]
        # An asynchronous op is not counted among the ops.
        is_small = one.peak_seconds - OVERHEAD_S < SMALL_S
        counted = {
            "num_ops": one.times if one.op.starts_at < 0 else 0,
            "small_ops": one.times if one.op.starts_at < 0 and is_small else 0,
            "bundles": one.op.bundles * one.times,
            "hbm_bytes": one.op.hbm_bytes * one.times,
            "link_s": one.op.link_s * one.times,
            "seconds": seconds,
            "min_seconds": seconds * spread.min_ratio,
            "max_seconds": seconds * spread.max_ratio,
            "peak_seconds": one.peak_seconds * one.times,
        }
        for name, value in counted.items():
            total[name] += value
    return Part(**total)


def _scaled(part: Part, factor: float) -> Part:
    return Part(**{name: value * factor for name, value in vars(part).items()})


def _added(one: Part, other: Part) -> Part:
    return Part(**{name: value + getattr(other, name) for name, value in vars(one).items()})
