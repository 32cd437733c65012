"""The step-time estimate: one formula over a program's ops, next to the roofline of the step's work.

An op costs `max(bundles / clock, HBM bytes / bandwidth) + overhead`, a collective `link bytes / bandwidth + overhead`;
what was started earlier costs only what the ops since then do not hide. A loop's body counts its trips, of a
conditional the cheapest branch counts. The roofline is the largest of operations, HBM bytes and link bytes over the
narrowest cut, each over its peak. Nothing here was measured: no waiting, no contention, no launch of a program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip
from rayserve_moe.tools.estimate.kernel_work import StepWork
from rayserve_moe.tools.estimate.program_ops import Block, Branches, Loop, Op

SMALL_S = 1e-6
"""Ops whose work takes less than this, so that their overhead is most of what they cost."""


@dataclass(frozen=True)
class OpTime:
    """An op, how often it is executed, and what one execution costs, seconds, with and without the overhead."""

    op: Op
    times: float
    in_layer: bool
    seconds: float
    bare_seconds: float


@dataclass(frozen=True)
class Part:
    """Ops of a layer or of a step: how many, their bundles and bytes, and what they cost in all, seconds.

    `small_ops` of them have less than `SMALL_S` of work.
    """

    num_ops: float = 0
    small_ops: float = 0
    bundles: float = 0
    hbm_bytes: float = 0
    link_s: float = 0
    seconds: float = 0
    bare_seconds: float = 0


@dataclass(frozen=True)
class Roofline:
    """The least time of a step's work, seconds, by what bounds it."""

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
    """The estimate of one program: a layer, a whole step, and the ops of both.

    `open_ops` are those of which a loop counts once because only a run knows its trips.
    """

    layer: Part
    step: Part
    roofline: Roofline
    ops: tuple[OpTime, ...]
    open_ops: tuple[str, ...]

    @property
    def share_of_roofline(self) -> float:
        """The roofline over the estimate: one where nothing is lost."""
        return self.roofline.seconds / self.step.seconds if self.step.seconds else 0.0

    def by_cost(self, *, in_layer: bool = True) -> list[OpTime]:
        """The ops of one layer, or outside the layers, the most costly first."""
        ops = [one for one in self.ops if one.in_layer == in_layer]
        return sorted(ops, key=lambda one: -one.seconds * one.times)

    def by_scope(self) -> dict[str, Part]:
        """What each named scope of a layer costs."""
        scopes = dict.fromkeys(one.op.scope for one in self.ops if one.in_layer)
        return {scope: _sum(one for one in self.ops if one.in_layer and one.op.scope == scope) for scope in scopes}


def estimate(tree: Block, *, chip: Chip, work: StepWork, missing_layers: int = 0) -> Estimate:
    """Price a program's tree for `chip`, with `missing_layers` more than it was compiled with.

    Layers are the trips of loops over layers; where there are several such loops, a layer is the average one.
    ValueError where layers are missing, and not exactly one loop could have them.
    """
    loops = [item for item in tree.items if isinstance(item, Loop) and item.is_layers]
    compiled = sum(loop.trips for loop in loops)
    if missing_layers and len(loops) != 1:
        raise ValueError(f"one loop over layers is needed to add {missing_layers} layers, the program has {len(loops)}")
    ops = tuple(Pricing(chip).ops(tree))
    outside = _sum(one for one in ops if not one.in_layer)
    layer = _sum(one for one in ops if one.in_layer)
    step = _added(outside, _scaled(layer, compiled + missing_layers))
    roofline = Roofline(work.flops / chip.device_flops, work.hbm_bytes / chip.device_hbm_bytes, step.link_s)
    return Estimate(layer, step, roofline, ops, tuple(sorted({one.op.name for one in ops if one.op.is_least})))


@dataclass(frozen=True)
class Pricing:
    """The formula, for one chip."""

    chip: Chip

    def ops(self, block: Block, *, times: float = 1.0, in_layer: bool = False) -> Iterator[OpTime]:
        """All ops of a block with their costs; those of loops over layers as often as one layer has them."""
        with_overhead, bare = self.costs(block, OVERHEAD_S), self.costs(block, 0.0)
        for item, seconds, bare_seconds in zip(block.items, with_overhead, bare, strict=True):
            match item:
                case Op():
                    yield OpTime(item, times, in_layer, seconds, bare_seconds)
                case Loop() if item.is_layers and not in_layer:
                    layers = sum(one.trips for one in block.items if isinstance(one, Loop) and one.is_layers)
                    yield from self.ops(item.body, times=item.trips / layers, in_layer=True)
                case Loop():
                    yield from self.ops(item.body, times=times * item.trips, in_layer=in_layer)
                case Branches():
                    yield from self.ops(self._cheapest(item), times=times, in_layer=in_layer)

    def costs(self, block: Block, overhead_s: float) -> list[float]:
        """Seconds of each item of a block."""
        seconds: list[float] = []
        for item in block.items:
            match item:
                case Op():
                    seconds.append(self._of_op(item, block, seconds, overhead_s))
                case Loop():
                    seconds.append(sum(self.costs(item.body, overhead_s)) * item.trips)
                case Branches():
                    seconds.append(sum(self.costs(self._cheapest(item), overhead_s)))
        return seconds

    def _of_op(self, op: Op, block: Block, before: list[float], overhead_s: float) -> float:
        in_core = op.bundles / self.chip.clock_hz
        in_hbm = op.hbm_bytes * op.idle_factor / self.chip.device_hbm_bytes
        seconds = max(in_core, in_hbm, op.link_s) + overhead_s
        if op.starts_at < 0:
            return seconds
        items = block.items[op.starts_at :]
        hidden = sum(
            self._leaves_free(item, cost, op) for item, cost in zip(items, before[op.starts_at :], strict=False)
        )
        return max(0.0, seconds - hidden)

    def _leaves_free(self, item: Op | Loop | Branches, cost: float, op: Op) -> float:
        """For how long an item leaves free what `op` needs: links, or HBM.

        Less than nothing where it used the links beside other items: no two exchanges have them at a time.
        """
        if not isinstance(item, Op):
            return 0.0
        if op.link_s and item.link_s and item.starts_at >= 0:
            return min(0.0, cost - item.link_s)
        taken = item.link_s if op.link_s else item.hbm_bytes / self.chip.device_hbm_bytes
        return max(0.0, cost - taken)

    def _cheapest(self, branches: Branches) -> Block:
        return min(branches.options, key=lambda option: sum(self.costs(option, OVERHEAD_S)), default=Block())


def _sum(ops: Iterator[OpTime]) -> Part:
    total: defaultdict[str, float] = defaultdict(float)
    for one in ops:
        work = one.bare_seconds * one.times
        counted = {
            # What was started earlier is no op of its own: it takes no place among them.
            "num_ops": one.times if one.op.starts_at < 0 else 0,
            "small_ops": one.times if one.op.starts_at < 0 and one.bare_seconds < SMALL_S else 0,
            "bundles": one.op.bundles * one.times,
            "hbm_bytes": one.op.hbm_bytes * one.times,
            "link_s": one.op.link_s * one.times,
            "seconds": one.seconds * one.times,
            "bare_seconds": work,
        }
        for name, value in counted.items():
            total[name] += value
    return Part(**total)


def _scaled(part: Part, factor: float) -> Part:
    return Part(**{name: value * factor for name, value in vars(part).items()})


def _added(one: Part, other: Part) -> Part:
    return Part(**{name: value + getattr(other, name) for name, value in vars(one).items()})
