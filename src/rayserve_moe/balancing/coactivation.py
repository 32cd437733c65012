"""Plan placements from rows of routing: experts that are chosen together share a rank, within a limit of its load.

The planner from counts (`planner`) balances the ranks first. Then pairs of ranks exchange replicas wherever that keeps
more pairs of a token's experts on a rank, and no rank exceeds its limit. Several limits are tried; each layer takes the
placement with the lowest cost (`traffic.CostRates`) for the batch size that is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.incremental import FIRST_ROUNDS, level
from rayserve_moe.balancing.layout import Layout, layout_of
from rayserve_moe.balancing.placement import NEAR_TOKENS, ExpertPlacement, PlacementError, placement_from
from rayserve_moe.balancing.planner import lower_bound, plan
from rayserve_moe.balancing.traffic import Batches, CostRates, keys_of, traffic_of

MIN_SWEEPS, ROUNDS = 2, 64
"""Minimum number of sweeps over all pairs of ranks, and minimum number of rounds in all, which few ranks reach by more
sweeps. A layer is finished after a sweep without a gain."""
LIMITS = (1.02, 1.2)
"""Limits of a rank's load that are tried, relative to the placement from counts."""
MIN_PAIRS = 1e-3
"""Minimum gain of an exchange, in pairs."""
PAIR_ROWS, COST_ROWS = 2048, 256
"""Rows per layer that pairs are counted in, and that costs are computed from; taken evenly from all."""
TIE_FACTOR, LARGE_TIE_FACTOR = 1.02, 1.002
"""Placements within this factor of a layer's minimum cost are tied; of these, the fewest ranks per token decide.

The second is for steps that choose slots by shares: their tokens are enough to make costs certain.
"""
FAR_GAIN = 4.0
"""Weight of a token whose expert comes to its slice, against a pair of experts that comes to a rank."""
RATES = CostRates()


@dataclass(frozen=True)
class ServedGroup:
    """The ranks and steps that a placement is planned for."""

    ep_size: int
    """Ranks that experts are divided over."""
    num_redundant: int
    """Slots of a layer beyond its experts; lowered until the ranks divide all slots."""
    batch: int
    """Tokens of a step over all ranks."""
    num_slices: int = 1
    """Slices that the ranks are divided over in order."""


def loads_of(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Count the tokens of each expert: `rows` [tokens, layers, k] to int64 [layers, experts]."""
    num_layers = rows.shape[1]
    counts = [np.bincount(rows[:, layer].reshape(-1), minlength=num_experts) for layer in range(num_layers)]
    return np.array(counts, np.int64).reshape(num_layers, num_experts)


def pair_counts(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Count the tokens that chose two experts together: `rows` [tokens, layers, k] to float32 [layers, E, E].

    The result is symmetric, with zeros on the diagonal.
    """
    num_layers, top_k = rows.shape[1:]
    left, right = np.triu_indices(top_k, k=1)
    found = np.empty((num_layers, num_experts, num_experts), np.float32)
    for layer in range(num_layers):
        ids = rows[:, layer].astype(np.int32)
        keys = ids[:, left] * num_experts + ids[:, right]
        counts = np.bincount(keys.reshape(-1), minlength=num_experts**2).reshape(num_experts, num_experts)
        found[layer] = counts + counts.T
        np.fill_diagonal(found[layer], 0)
    return found


def plan_from_rows(
    rows: np.ndarray,
    group: ServedGroup,
    *,
    num_experts: int,
    rates: CostRates = RATES,
    load: np.ndarray | None = None,
    today: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Place the experts of every layer for `rows` [tokens, layers, k] that a group serves.

    `load` [layers, experts] is balanced in place of the rows' own counts. Each layer takes the cheapest of the
    placement from counts and its improvements, or of `today` if that has as many slots. Raises PlacementError for
    numbers that do not fit.
    """
    _check(rows, group, num_experts=num_experts)
    load = loads_of(rows, num_experts) if load is None else load
    first = plan(load, ep_size=group.ep_size, num_redundant=group.num_redundant)
    if not len(rows) or first.slots_per_rank >= num_experts or group.ep_size == 1:
        return first
    tried = [first, *improvements(first, load, rows=rows, num_slices=group.num_slices)]
    if today is not None and (today.ep_size, today.num_slots) == (first.ep_size, first.num_slots):
        tried.insert(0, today)
    return cheapest(tried, rows, batch=group.batch, num_slices=group.num_slices, rates=rates)


def improvements(
    first: ExpertPlacement,
    load: np.ndarray,
    *,
    rows: np.ndarray,
    num_slices: int,
    limits: tuple[float, ...] = LIMITS,
) -> Iterator[ExpertPlacement]:
    """Yield a placement for each of `limits` with more of the rows' pairs together; each continues from the one before.

    `load` [layers, experts] is what ranks are balanced for.
    """
    pairs = pair_counts(_sample(rows, PAIR_ROWS), first.num_experts)
    shape = first.num_layers, first.ep_size, first.slots_per_rank
    layout = layout_of(first.expert_of_slot.reshape(shape).astype(np.int64), first.num_experts)
    layout.num_slices = num_slices
    scaled = np.asarray(load, np.float64)
    peaks = layout.peaks(layout.even_amounts(scaled))
    bound = lower_bound(scaled, ep_size=first.ep_size, num_redundant=first.num_redundant)
    for limit in limits:
        gather_pairs(layout, scaled, pairs=pairs, limit=limit * peaks)
        goal = np.maximum(bound, 1e-300)
        amounts = level(layout, scaled, start=layout.even_amounts(scaled), goal=goal, rounds=FIRST_ROUNDS)
        whole = np.take_along_axis(scaled, layout.by_layer, axis=1)
        even = layout.even_amounts(np.ones_like(scaled))
        shares = np.where(whole > 0, amounts / np.where(whole > 0, whole, 1), even)
        yield placement_from(layout.by_layer.copy(), shares, num_experts=first.num_experts, ep_size=first.ep_size)


def cheapest(
    placements: list[ExpertPlacement], rows: np.ndarray, *, batch: int, num_slices: int = 1, rates: CostRates = RATES
) -> ExpertPlacement:
    """Return the placement whose layers have the lowest cost among those of `placements`.

    Of tied costs it is the one with the fewest ranks per token; then the first.
    """
    sample, one = _sample(rows, max(COST_ROWS, batch)), placements[0]
    batches = Batches(len(sample), batch, one.ep_size, num_slices)
    keys = keys_of(sample, batches, num_experts=one.num_experts)
    found = [traffic_of(each, sample, batch=batch, num_slices=num_slices, keys=keys) for each in placements]
    costs = np.array([each.seconds(rates, batch=batch, num_ranks=one.ep_size) for each in found])
    ranks = np.array([each.distinct_ranks for each in found])
    factor = TIE_FACTOR if batch <= NEAR_TOKENS else LARGE_TIE_FACTOR
    best = np.where(costs <= factor * costs.min(axis=0), ranks, np.inf).argmin(axis=0)
    layers = np.arange(len(best))
    experts, shares = (
        np.stack([getattr(each, name) for each in placements])[best, layers]
        for name in ("expert_of_slot", "share_of_slot")
    )
    return placement_from(experts, shares, num_experts=one.num_experts, ep_size=one.ep_size)


def _check(rows: np.ndarray, group: ServedGroup, *, num_experts: int) -> None:
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise PlacementError(f"rows are {rows.dtype} of shape {rows.shape}, not integers of [tokens, layers, k]")
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < num_experts:
        raise PlacementError(f"a row names an expert outside of 0..{num_experts - 1}")
    if group.batch < 1:
        raise PlacementError(f"steps of {group.batch} tokens compute nothing")
    if group.num_slices < 1 or group.ep_size % group.num_slices:
        raise PlacementError(f"{group.ep_size} ranks do not spread evenly over {group.num_slices} slices")


def _sample(rows: np.ndarray, number: int) -> np.ndarray:
    """Return at most `number` rows, at even distances."""
    if len(rows) <= number:
        return rows
    return rows[np.arange(number) * len(rows) // number]


def gather_pairs(layout: Layout, load: np.ndarray, *, pairs: np.ndarray, limit: np.ndarray) -> None:
    """Exchange replicas between ranks to bring experts of `pairs` [layers, E, E] together, and replicas to each slice.

    No exchange brings a rank above its layer's `limit` [layers], by `load` [layers, experts] in even shares. All pairs
    of ranks take turns; disjoint pairs exchange at the same time.
    """
    # Of two experts with several replicas each, tokens need the smaller number of meetings.
    counts = layout.counts.astype(np.float32)
    weights = pairs / np.minimum(counts[:, :, None], counts[:, None, :])
    layers = np.arange(layout.num_layers)
    num_ranks = layout.experts.shape[1]
    rounds = list(_rounds(num_ranks))
    for _ in range(max(MIN_SWEEPS, ROUNDS // max(1, num_ranks - 1))):
        part = layout.of_layers(layers)
        search = _PairSearch(part, load[layers], weights=weights, limit=limit[layers], layers=layers)
        for ones, others in rounds:
            search.exchange(ones, others)
        layout.put(layers, part)
        layers = layers[search.has_gained]
        if not layers.size:
            break


def _rounds(num_ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rounds in which all ranks, or all but one, meet in pairs, such that every two ranks meet once."""
    even = num_ranks + num_ranks % 2
    circle = np.arange(even)
    for _ in range(even - 1):
        ones, others = circle[: even // 2], circle[even // 2 :][::-1]
        real = (ones < num_ranks) & (others < num_ranks)
        yield ones[real], others[real]
        circle = np.concatenate([circle[:1], np.roll(circle[1:], 1)])


class _PairSearch:
    """Exchanges between pairs of ranks, in all layers at once, and the sums that value them.

    Look-ups are of flat arrays, which are several times faster than look-ups with an index per dimension.
    """

    # N pairs of ranks, each in a layer: the last dimension, because operations along it are fast   S slots per rank

    def __init__(
        self, layout: Layout, load: np.ndarray, *, weights: np.ndarray, limit: np.ndarray, layers: np.ndarray
    ) -> None:
        self._layout, self._weights, self._layers = layout, weights, layers
        self._limit = limit * (1 + 1e-9)
        self._each = load / layout.counts
        self._ranks = layout.even_amounts(load).reshape(layout.experts.shape).sum(axis=2)
        self._load = load.astype(np.float32)
        num_layers, num_ranks, num_experts = layout.held.shape
        self._per_slice = num_ranks // layout.num_slices
        slices = (num_layers, layout.num_slices, self._per_slice, num_experts)
        self._on_slice = layout.held.reshape(slices).sum(axis=2)
        """Replicas on a slice, int [layers, slices, experts]."""
        own = weights if len(layers) == len(weights) else weights[layers]
        self._near = np.matmul(layout.held.astype(np.float32), own)
        """Pairs that an expert has on a rank, float32 [layers, ranks, experts]."""
        self.has_gained = np.zeros(num_layers, np.bool_)

    def exchange(self, ones: np.ndarray, others: np.ndarray) -> None:
        """Let each of the ranks `ones` make the best exchange with its partner of `others`, in every layer."""
        num_layers = self._layout.num_layers
        layers = np.repeat(np.arange(num_layers), len(ones))
        one, other = np.tile(ones, num_layers), np.tile(others, num_layers)
        ours, theirs = (self._held_by(ranks) for ranks in (ones, others))
        moved_out = self._moved(layers, one, other, experts=ours)
        moved_in = self._moved(layers, other, one, experts=theirs)
        # Experts that would meet only lower the gain.
        kept = np.flatnonzero(moved_out.max(axis=0) + moved_in.max(axis=0) > MIN_PAIRS)
        layers, one, other = layers[kept], one[kept], other[kept]
        ours, theirs = ours.take(kept, axis=1), theirs.take(kept, axis=1)
        gain = moved_out.take(kept, axis=1)[:, None] + moved_in.take(kept, axis=1)
        gain -= self._meeting(layers, ours, theirs)
        each, first = self._each.reshape(-1), layers * self._each.shape[1]
        given = _look_up(each, first + ours)[:, None] - _look_up(each, first + theirs)
        limit = self._limit[layers]
        is_over = self._ranks[layers, one] - given > limit
        is_over |= self._ranks[layers, other] + given > limit
        np.copyto(gain, -1, where=is_over)
        gain = gain.reshape(len(ours) ** 2, len(kept))
        found = np.flatnonzero(gain.max(axis=0) > MIN_PAIRS)
        i, j = np.divmod(gain.take(found, axis=1).argmax(axis=0), len(ours))
        self._apply(layers[found], (one[found], i), other=(other[found], j))

    def _held_by(self, ranks: np.ndarray) -> np.ndarray:
        """Return the experts of `ranks` in all layers, [S, N]."""
        num_slots = self._layout.experts.shape[2]
        return np.ascontiguousarray(self._layout.experts[:, ranks].reshape(-1, num_slots).T)

    def _meeting(self, layers: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Return twice the pairs of two experts [S, S, N], which stay apart if they change places."""
        num_experts = self._weights.shape[2]
        row = (self._layers[layers] * num_experts + ours) * num_experts
        pairs = _look_up(self._weights.reshape(-1), row[:, None] + theirs)
        pairs += pairs
        return pairs

    def _moved(self, layers: np.ndarray, here: np.ndarray, there: np.ndarray, *, experts: np.ndarray) -> np.ndarray:
        """Return the gain of moving each of `experts` [S, N] from a rank to its partner.

        It is negative if the partner already holds the expert. Between slices, tokens whose expert comes to a slice
        that lacks it count `FAR_GAIN` times.
        """
        _, num_ranks, num_experts = self._near.shape
        at_here, at_there = ((layers * num_ranks + rank) * num_experts + experts for rank in (here, there))
        near = self._near.reshape(-1)
        gain = _look_up(near, at_there) - _look_up(near, at_here)
        if self._layout.num_slices > 1:
            gain += self._slice_gain(layers, here, there, experts=experts)
        np.copyto(gain, -np.inf, where=_look_up(self._layout.held.reshape(-1), at_there))
        return gain

    def _slice_gain(
        self, layers: np.ndarray, here: np.ndarray, there: np.ndarray, *, experts: np.ndarray
    ) -> np.ndarray:
        """Return the part of a move's gain for tokens of the slices that an expert comes to or leaves."""
        from_slice, to_slice = here // self._per_slice, there // self._per_slice
        lacks = self._on_slice[layers, to_slice, experts] == 0
        leaves = self._on_slice[layers, from_slice, experts] == 1
        change = (lacks.astype(np.float32) - leaves) * self._load[layers, experts]
        return FAR_GAIN * np.where(from_slice == to_slice, 0, change)

    def _apply(self, layer: np.ndarray, one: tuple[np.ndarray, np.ndarray], *, other: tuple[np.ndarray, ...]) -> None:
        layout = self._layout
        gone, come = layout.experts[layer, *one], layout.experts[layer, *other]
        layout.exchange(layer, one, other=(other[0], other[1]))
        change = self._weights[self._layers[layer], come] - self._weights[self._layers[layer], gone]
        self._near[layer, one[0]] += change
        self._near[layer, other[0]] -= change
        if layout.num_slices > 1:
            self._replicas_moved(layer, one[0] // self._per_slice, other[0] // self._per_slice, gone=gone, come=come)
        given = self._each[layer, gone] - self._each[layer, come]
        self._ranks[layer, one[0]] -= given
        self._ranks[layer, other[0]] += given
        self.has_gained[layer] = True

    def _replicas_moved(
        self, layer: np.ndarray, one_slice: np.ndarray, other_slice: np.ndarray, *, gone: np.ndarray, come: np.ndarray
    ) -> None:
        """Count replicas on slices after an exchange."""
        np.add.at(self._on_slice, (layer, one_slice, come), 1)
        np.add.at(self._on_slice, (layer, other_slice, gone), 1)
        np.add.at(self._on_slice, (layer, one_slice, gone), -1)
        np.add.at(self._on_slice, (layer, other_slice, come), -1)


def _look_up(flat: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the elements at `places` without a check of their range."""
    return flat.take(places, mode="clip")
