"""Search for placements with a lower maximum rank load: for a new load with few moves, or without a budget.

`rebalance` levels shares first, which moves nothing. Then the hottest rank of each layer repeatedly makes the move with
the best relief per moved expert, until the layer is close enough to its goal. `refine` searches under even shares: it
exchanges and replaces replicas, with restarts. All layers take each step together but are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.layout import Layout, Slot, coldest_other, min_locations

FIRST_ROUNDS, ROUNDS = 32, 12
RANKS_TRIED = 8
GAIN = 1e-5  # minimum relief of the hottest rank by a move, relative to its load
FAR_COST = 8.0  # factor by which a move between slices must relieve more than a move within a slice
CLOSE, CLOSE_ENOUGH = 1.0003, 1.002  # relative to the bound: where `refine` stops, and where it does not restart
MAX_MOVES = 400  # of a descent
RESTARTS, DISTURBANCES = 256, 4
MIN_RETRIES, MAX_RETRIES = 32, 128  # consecutive restarts without a gain for a layer
SMALL = 1 << 14  # exchanges of a rank, times restarts: what small layers may try beyond MIN_RETRIES


@dataclass(frozen=True)
class _Moves:
    """The best move of each layer: exchange a slot of the hottest rank with another, or replicate its expert there."""

    peak: np.ndarray
    """Load of the hottest rank, [layers]."""
    after: np.ndarray
    """Maximum load of the touched ranks after the move, [layers]."""
    is_exchange: np.ndarray
    hot_slot: Slot
    other: Slot

    @property
    def cost(self) -> np.ndarray:
        """Return the number of experts that change rank."""
        return np.where(self.is_exchange, 2, 1)

    def of(self, layers: np.ndarray) -> tuple[Slot, Slot]:
        """Return the two slots in some of the layers."""
        (rank, place), (other_rank, other_place) = self.hot_slot, self.other
        return (rank[layers], place[layers]), (other_rank[layers], other_place[layers])


def rebalance(
    layout: Layout, load: np.ndarray, *, amounts: np.ndarray, goal: np.ndarray, budget: float = np.inf
) -> np.ndarray:
    """Change `layout` until no rank of a layer exceeds `goal` [layers], no move helps, or `budget` is spent.

    `load` is [layers, experts]; `amounts` and the result [layers, slots] are its split over the slots. The budget
    counts experts that change rank; the hottest layers spend it first.
    """
    amounts = level(layout, load, start=amounts, goal=goal, rounds=FIRST_ROUNDS)
    max_tried = min(RANKS_TRIED, layout.experts.shape[1])
    tried = np.zeros(layout.num_layers, np.int64)
    while (layers := np.flatnonzero((layout.peaks(amounts) > goal) & (tried < max_tried))).size:
        part = layout.of_layers(layers)
        items = amounts[layers].reshape(part.experts.shape)
        moves = _best_moves(part, items, goal=goal[layers], which=tried[layers])
        helps = _affordable(moves, goal[layers], budget)
        # Ranks that share experts are equally hot: if the first of them finds no move, another may.
        tried[layers] = np.where(helps, 0, tried[layers] + 1)
        if not helps.any():
            continue
        budget -= int(moves.cost[helps].sum())
        _apply(part, items, moves, helps)
        layers, part = layers[helps], part.of_layers(helps)
        layout.put(layers, part)
        start = items[helps].reshape(len(layers), amounts.shape[1])
        amounts[layers] = level(part, load[layers], start=start, goal=goal[layers], rounds=ROUNDS)
    return amounts


def _affordable(moves: _Moves, goal: np.ndarray, budget: float) -> np.ndarray:
    """Return the layers whose move helps and fits the budget, which the hottest spend first."""
    helps = (moves.peak > goal) & (moves.after < moves.peak * (1 - GAIN))
    hottest_first = np.argsort(-moves.peak / goal, kind="stable")
    spent = np.cumsum((moves.cost * helps)[hottest_first])
    within = np.empty_like(helps)
    within[hottest_first] = spent <= budget
    return helps & within


def _best_moves(layout: Layout, items: np.ndarray, *, goal: np.ndarray, which: np.ndarray) -> _Moves:
    """Return the best move of the `which`-th hottest rank of each layer.

    Moves are judged by the load of the touched ranks before shares are levelled again. The relief of moves between
    slices is discounted.
    """
    layers = np.arange(len(items))
    ranks = items.sum(axis=2)
    hottest = np.argsort(-ranks, axis=1, kind="stable")[layers, which]
    peak = ranks[layers, hottest]
    hot_items = items[layers, hottest][:, :, None, None]
    has_hot = layout.held[layers[:, None], :, layout.experts[layers, hottest]]
    rest = (ranks[:, :, None] - items)[:, None]
    wide_peak = peak[:, None, None, None]
    given = np.clip((wide_peak - rest) / 2, 0, hot_items)
    after = np.maximum(wide_peak - given, rest + given)
    np.maximum(after, (coldest_other(layout, ranks) + items)[:, None], out=after)
    after[has_hot] = np.inf
    near = layout.on_slices(layout.held)[layers[:, None], :, layout.experts[layers, hottest]]
    replicated, replica_places = min_locations(_discounted(after, wide_peak, near[..., None]))
    after = np.maximum(wide_peak - hot_items + items[:, None], rest + hot_items)
    after[has_hot] = np.inf
    taken = np.take_along_axis(layout.held[layers, hottest], layout.by_layer, axis=1).reshape(items.shape)
    after[np.broadcast_to(taken[:, None], after.shape)] = np.inf
    near = layout.on_slices(np.arange(ranks.shape[1]) == hottest[:, None])
    exchanged, exchange_places = min_locations(_discounted(after, wide_peak, near[:, None, :, None]))
    # An exchange moves two experts, so it must relieve twice as much. Relief beyond the goal does not count.
    is_exchange = (peak - np.maximum(exchanged, goal)) / 2 > peak - np.maximum(replicated, goal)
    place, rank, other = (np.where(is_exchange, a, b) for a, b in zip(exchange_places, replica_places, strict=True))
    after = np.where(is_exchange, exchanged, replicated)
    return _Moves(peak, after, is_exchange, hot_slot=(hottest, place), other=(rank, other))


def _discounted(after: np.ndarray, peak: np.ndarray, is_near: np.ndarray) -> np.ndarray:
    """Return the load `after` a move, with discounted relief of the peak for moves that are not near."""
    return after if is_near.all() else np.where(is_near, after, peak - (peak - after) / FAR_COST)


def _apply(layout: Layout, items: np.ndarray, moves: _Moves, helps: np.ndarray) -> None:
    """Apply the moves to `layout` and to the loads of its slots, `items`."""
    layers = np.flatnonzero(helps & moves.is_exchange)
    hot, other = moves.of(layers)
    layout.exchange(layers, hot, other=other)
    items[layers, *hot], items[layers, *other] = items[layers, *other], items[layers, *hot]
    layers = np.flatnonzero(helps & ~moves.is_exchange)
    if not layers.size:
        return
    hot, other = moves.of(layers)
    ranks = items[layers].sum(axis=2)
    gone, freed = layout.experts[layers, *other], items[layers, *other]
    layout.replace(layers, other, experts=layout.experts[layers, *hot])
    # The load of the replaced replica goes to the coldest rank that still holds its expert.
    holders = np.where(layout.experts[layers] == gone[:, None, None], ranks[:, :, None], np.inf)
    _, heir = min_locations(holders)
    rest = ranks[np.arange(len(layers)), other[0]] - freed
    given = np.clip((moves.peak[layers] - rest) / 2, 0, items[layers, *hot])
    items[layers, *hot] -= given
    items[layers, *other] = given
    items[layers, *heir] += freed


def level(layout: Layout, load: np.ndarray, *, start: np.ndarray, goal: np.ndarray, rounds: int) -> np.ndarray:
    """Split each expert's load over its slots, from the split `start`: float64 [layers, slots].

    `load` is [layers, experts], `goal` [layers]. Stops after `rounds`, or once no layer's hottest rank exceeds its
    goal; each layer gets the split with the lowest peak that was found.
    """
    num_layers, num_ranks, num_slots = layout.experts.shape
    flow = _Flow(layout, load, start=start)
    ahead, before = flow.amounts, flow.amounts
    best, peak = flow.amounts, np.full(num_layers, np.inf)
    for turn in range(rounds + 1):
        now = flow.ranks(before).reshape(num_layers, num_ranks).max(axis=1)
        best = np.where((now < peak)[flow.layer_of], before, best)
        peak = np.minimum(peak, now)
        if turn == rounds or (peak <= goal).all():
            break
        after = flow.equalised(ahead)
        # Momentum along the previous step levels distant ranks in few rounds.
        ahead, before = after + (turn + 1) / (turn + 4) * (after - before), after
    result = start.reshape(-1).copy()
    result[flow.slots] = best
    return result.reshape(num_layers, num_ranks * num_slots)


class _Flow:
    """The slots between which load can flow: of experts with several replicas and some load.

    Load flows between ranks that hold the same expert, like water between communicating vessels, until their levels are
    equal or a slot is empty. The shares of an expert always add up to 1.
    """

    def __init__(self, layout: Layout, load: np.ndarray, *, start: np.ndarray) -> None:
        num_layers, num_ranks, num_slots = layout.experts.shape
        keys = (layout.by_layer + load.shape[1] * np.arange(num_layers)[:, None]).reshape(-1)
        amounts = start.reshape(-1)
        self.slots = np.flatnonzero(((layout.counts > 1) & (load > 0)).reshape(-1)[keys])
        self.amounts = amounts[self.slots]
        self.layer_of = self.slots // (num_ranks * num_slots)
        self._rank_of = self.slots // num_slots
        self._expert_of = np.unique(keys[self.slots], return_inverse=True)[1]
        fixed = amounts.copy()
        fixed[self.slots] = 0
        self._fixed = fixed.reshape(-1, num_slots).sum(axis=1)
        # All slots of a rank react to its level at the same time, so each corrects only its part of the difference.
        self._pace = 1 / np.bincount(self._rank_of, minlength=self._fixed.size)[self._rank_of]
        self._weight = self._pace / self._sum_by_expert(self._pace)
        self._total = self._sum_by_expert(self.amounts)

    def ranks(self, amounts: np.ndarray) -> np.ndarray:
        """Return the load of every rank of every layer."""
        return self._fixed + np.bincount(self._rank_of, weights=amounts, minlength=self._fixed.size)

    def equalised(self, amounts: np.ndarray) -> np.ndarray:
        """Move load between slots of the same expert, from fuller to emptier ranks; no slot falls below zero."""
        levels = self.ranks(amounts)[self._rank_of]
        moved = amounts + self._pace * (self._sum_by_expert(self._weight * levels) - levels)
        np.maximum(moved, 0, out=moved)
        return moved * (self._total / self._sum_by_expert(moved))

    def _sum_by_expert(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self._expert_of, weights=values)[self._expert_of] if values.size else values


def refine(layout: Layout, load: np.ndarray, *, bound: np.ndarray) -> None:
    """Reduce the load of the hottest rank of each layer towards `bound` [layers] by local search with restarts.

    Layers above it are perturbed and searched again several times; the best result is kept.
    """
    descend(layout, load, goal=CLOSE * bound)
    generator = np.random.default_rng(0)
    best = layout.peaks(layout.even_amounts(load))
    _, num_ranks, num_slots = layout.experts.shape
    retries = np.clip(SMALL // (num_ranks * num_slots**2), MIN_RETRIES, MAX_RETRIES)
    fruitless = np.zeros(layout.num_layers, np.int64)
    for _ in range(RESTARTS):
        layers = np.flatnonzero((best > CLOSE_ENOUGH * bound) & (fruitless < retries))
        if not layers.size:
            break
        part = layout.of_layers(layers)
        for turn in range(DISTURBANCES):
            _disturb(part, load[layers], generator, from_hottest=turn == 0)
        descend(part, load[layers], goal=CLOSE * bound[layers])
        peaks = part.peaks(part.even_amounts(load[layers]))
        fruitless[layers] = np.where(peaks < best[layers] * (1 - GAIN), 0, fruitless[layers] + 1)
        kept = peaks <= best[layers]
        layout.put(layers[kept], part.of_layers(kept))
        best[layers[kept]] = peaks[kept]


def descend(layout: Layout, load: np.ndarray, *, goal: np.ndarray) -> None:
    """Relieve the hottest rank of each layer by the best single move, until it reaches `goal` or no move helps.

    `load` is [layers, experts]. The moves: the hottest rank exchanges a replica with another rank; an expert of it gets
    a further replica in the slot of another expert that has several; or it replaces such an expert by a colder one.
    """
    layers = np.arange(layout.num_layers)
    for _ in range(MAX_MOVES):
        part = layout.of_layers(layers)
        loads = _Loads(part, load[layers])
        exchanged, hot_slot, other = _best_exchange(part, loads)
        replaced, slot, expert = _best_replacement(part, loads)
        after = np.minimum(exchanged, replaced)
        helps = (loads.peak > goal[layers]) & (after < loads.peak * (1 - GAIN))
        if not helps.any():
            break
        chosen = np.flatnonzero(helps & (exchanged <= replaced))
        part.exchange(chosen, (loads.hottest[chosen], hot_slot[chosen]), other=_of(other, chosen))
        chosen = np.flatnonzero(helps & (exchanged > replaced))
        part.replace(chosen, _of(slot, chosen), experts=expert[chosen])
        layers = layers[helps]
        layout.put(layers, part.of_layers(helps))


class _Loads:
    """Loads of slots and ranks under even shares, the hottest rank, and the effects of changing a replica."""

    def __init__(self, layout: Layout, load: np.ndarray) -> None:
        self.layers = np.arange(layout.num_layers)
        self.items = layout.even_amounts(load).reshape(layout.experts.shape)
        self.ranks = self.items.sum(axis=2)
        self.hottest = self.ranks.argmax(axis=1)
        self.peak = self.ranks[self.layers, self.hottest]
        self.hot_experts = layout.experts[self.layers, self.hottest]
        self.hot_items = self.items[self.layers, self.hottest]
        self.has_hot = layout.held[self.layers[:, None], :, self.hot_experts]
        self.in_hot = layout.held[self.layers, self.hottest]
        self.with_more = load / (layout.counts + 1)
        growth = load / np.maximum(layout.counts - 1, 1) - load / layout.counts
        growth = np.take_along_axis(growth, layout.by_layer, axis=1).reshape(layout.experts.shape)
        self.without = layout.hottest_other(self.ranks) + growth


def _best_exchange(layout: Layout, loads: _Loads) -> tuple[np.ndarray, np.ndarray, Slot]:
    """Return per layer the hottest rank's load after the move, its slot, and the other slot."""
    given = loads.hot_items[:, :, None, None] - loads.items[:, None]
    after = np.maximum(loads.peak[:, None, None, None] - given, loads.ranks[:, None, :, None] + given)
    taken = np.take_along_axis(loads.in_hot, layout.by_layer, axis=1).reshape(layout.experts.shape)
    np.copyto(after, np.inf, where=loads.has_hot[..., None] | taken[:, None])
    peak, (hot_slot, rank, place) = min_locations(after)
    return peak, hot_slot, (rank, place)


def _best_replacement(layout: Layout, loads: _Loads) -> tuple[np.ndarray, Slot, np.ndarray]:
    """Return per layer the hottest rank's load after the move, the slot, and the expert that it gets.

    The loads are upper bounds: if several changes meet on a rank, the relieving ones are ignored.
    """
    smaller = np.take_along_axis(loads.with_more, loads.hot_experts, axis=1)
    relieved = loads.peak[:, None] - loads.hot_items + smaller
    after = (loads.ranks[:, :, None] - loads.items)[:, None] + smaller[:, :, None, None]
    np.maximum(after, loads.without[:, None], out=after)
    np.maximum(after, relieved[:, :, None, None], out=after)
    np.copyto(after, np.inf, where=loads.has_hot[..., None])
    outward, (hot_slot, rank, place) = min_locations(after)
    expert = loads.hot_experts[loads.layers, hot_slot]
    after = (loads.peak[:, None] - loads.hot_items)[:, :, None] + loads.with_more[:, None]
    np.maximum(after, loads.without[loads.layers, loads.hottest][:, :, None], out=after)
    np.copyto(after, np.inf, where=loads.in_hot[:, None])
    inward, (hot_slot, colder) = min_locations(after)
    is_outward = outward <= inward
    slot = np.where(is_outward, rank, loads.hottest), np.where(is_outward, place, hot_slot)
    return np.minimum(outward, inward), slot, np.where(is_outward, expert, colder)


def _disturb(layout: Layout, load: np.ndarray, generator: np.random.Generator, *, from_hottest: bool) -> None:
    """Make a random move, the same in all layers that allow it, regardless of the loads."""
    num_layers, num_ranks, num_slots = layout.experts.shape
    layers = np.arange(num_layers)
    here, there = generator.integers(num_ranks, size=2)
    i, j = np.broadcast_to(generator.integers(num_slots, size=(2, 1)), (2, num_layers))
    rank, other = np.full((2, num_layers), [[here], [there]])
    if from_hottest:
        rank = layout.even_amounts(load).reshape(layout.experts.shape).sum(axis=2).argmax(axis=1)
    ours, theirs = layout.experts[layers, rank, i], layout.experts[layers, other, j]
    fits = ~layout.held[layers, other, ours]
    if generator.random() < 1 / 2:
        chosen = np.flatnonzero(fits & ~layout.held[layers, rank, theirs])
        layout.exchange(chosen, (rank[chosen], i[chosen]), other=(other[chosen], j[chosen]))
    else:
        chosen = np.flatnonzero(fits & (layout.counts[layers, theirs] > 1))
        layout.replace(chosen, (other[chosen], j[chosen]), experts=ours[chosen])


def _of(slot: Slot, layers: np.ndarray) -> Slot:
    return slot[0][layers], slot[1][layers]
