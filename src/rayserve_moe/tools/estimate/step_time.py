"""The step-time estimate: a formula over a program's ops, next to the roofline of the step's work.

An op costs `max(bundles / clock, HBM bytes / bandwidth) + overhead`, a collective `link bytes / bandwidth + overhead`.
An asynchronous op costs only the time that the ops since its start do not hide. A loop's body counts with its trips; a
conditional counts its cheapest branch. The roofline is the maximum of operations, HBM bytes and link bytes over the
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
"""Work below which an op is small: the overhead is most of its cost."""


@dataclass(frozen=True)
class OpTime:
    """An op with its cost."""

    op: Op
    times: float
    """Number of executions."""
    in_layer: bool
    seconds: float
    """Seconds of an execution, with the overhead."""
    bare_seconds: float
    """Seconds of an execution, without the overhead."""


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
    bare_seconds: float = 0
    """Without the overhead."""


@dataclass(frozen=True)
class Roofline:
    """The minimum time of a step's work, in seconds, by bound."""

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


def estimate(tree: Block, *, chip: Chip, work: StepWork, missing_layers: int = 0) -> Estimate:
    """Price a program's tree for `chip`, with `missing_layers` more than it was compiled with.

    Layers are the trips of loops over layers; with several such loops, a layer is the average. Raises ValueError if
    layers are missing and the program does not have exactly one such loop.
    """
    loops = [item for item in tree.items if isinstance(item, Loop) and item.is_layers]
    compiled = sum(loop.trips for loop in loops)
    if missing_layers and len(loops) != 1:
        raise ValueError(f"adding {missing_layers} layers requires one loop over layers, the program has {len(loops)}")
    ops = tuple(Pricing(chip).ops(tree))
    outside = _sum(one for one in ops if not one.in_layer)
    layer = _sum(one for one in ops if one.in_layer)
    step = _added(outside, _scaled(layer, compiled + missing_layers))
    roofline = Roofline(work.flops / chip.device_flops, work.hbm_bytes / chip.device_hbm_bytes, step.link_s)
    return Estimate(layer, step, roofline, ops, tuple(sorted({one.op.name for one in ops if one.op.is_least})))


@dataclass(frozen=True)
class Pricing:
    """The formula for a chip."""

    chip: Chip

    def ops(self, block: Block, *, times: float = 1.0, in_layer: bool = False) -> Iterator[OpTime]:
        """Yield all ops of a block with their costs; ops in loops over layers with their executions per layer."""
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
        """Return the seconds of each item of a block."""
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
        """Return how long an item leaves free the resource that `op` needs: links, or HBM.

        Negative if the item used the links beside other items, because exchanges share the links.
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
            # An asynchronous op is not counted among the ops.
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
