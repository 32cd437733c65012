"""Local search for even shares: exchange and replace replicas until the hottest rank of a layer gains no more.

All layers take each step together, each its own best one; what comes of a layer does not depend on the others.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.layout import Layout, Slot, least_places

CLOSE, CLOSE_ENOUGH = 1.0003, 1.002  # of the bound: where the search ends, and where it does not begin anew
GAIN = 1e-5  # the least part of its load by which a move must relieve the hottest rank
MAX_MOVES = 400  # of one descent
RESTARTS, DISTURBANCES = 256, 4
LEAST_RETRIES, MOST_RETRIES = 32, 128  # restarts in a row that gain a layer nothing
SMALL = 1 << 14  # exchanges of one rank, times restarts: what small layers may try beyond LEAST_RETRIES


def refine(layout: Layout, load: np.ndarray, *, bound: np.ndarray) -> None:
    """Reduce the load of the hottest rank of each layer towards `bound` [layers] by local search with restarts.

    Layers that stay above it are perturbed and searched again a few times; the best result is kept.
    """
    descend(layout, load, goal=CLOSE * bound)
    generator = np.random.default_rng(0)
    best = layout.peaks(layout.even_amounts(load))
    _, num_ranks, num_slots = layout.experts.shape
    retries = np.clip(SMALL // (num_ranks * num_slots**2), LEAST_RETRIES, MOST_RETRIES)
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
    """Relieve the hottest rank of each layer by the best single move, until it carries `goal` or no move helps.

    `load` is [layers, experts]. The moves: the hottest rank exchanges a replica with another rank; one of its experts
    gets a further replica in the slot of an expert that can spare it; or it takes a colder expert in for one that can.
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
    """Loads of slots and ranks of a layout under even shares, the hottest rank, and what one replica changes."""

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
    """Of each layer: the hottest rank's load after the move, the place of its slot, and the other slot."""
    given = loads.hot_items[:, :, None, None] - loads.items[:, None]
    after = np.maximum(loads.peak[:, None, None, None] - given, loads.ranks[:, None, :, None] + given)
    after[loads.has_hot] = np.inf
    taken = np.take_along_axis(loads.in_hot, layout.by_layer, axis=1).reshape(layout.experts.shape)
    after[np.broadcast_to(taken[:, None], after.shape)] = np.inf
    peak, (hot_slot, rank, place) = least_places(after)
    return peak, hot_slot, (rank, place)


def _best_replacement(layout: Layout, loads: _Loads) -> tuple[np.ndarray, Slot, np.ndarray]:
    """Of each layer: the hottest rank's load after the move, the slot, and the expert that it gets.

    Bounds from above: where several changes meet on a rank, those that relieve it are left out.
    """
    smaller = np.take_along_axis(loads.with_more, loads.hot_experts, axis=1)
    relieved = loads.peak[:, None] - loads.hot_items + smaller
    after = (loads.ranks[:, :, None] - loads.items)[:, None] + smaller[:, :, None, None]
    np.maximum(after, loads.without[:, None], out=after)
    np.maximum(after, relieved[:, :, None, None], out=after)
    after[loads.has_hot] = np.inf
    outward, (hot_slot, rank, place) = least_places(after)
    expert = loads.hot_experts[loads.layers, hot_slot]
    after = (loads.peak[:, None] - loads.hot_items)[:, :, None] + loads.with_more[:, None]
    np.maximum(after, loads.without[loads.layers, loads.hottest][:, :, None], out=after)
    after[np.broadcast_to(loads.in_hot[:, None], after.shape)] = np.inf
    inward, (hot_slot, colder) = least_places(after)
    is_outward = outward <= inward
    slot = np.where(is_outward, rank, loads.hottest), np.where(is_outward, place, hot_slot)
    return np.minimum(outward, inward), slot, np.where(is_outward, expert, colder)


def _disturb(layout: Layout, load: np.ndarray, generator: np.random.Generator, *, from_hottest: bool) -> None:
    """One move at random, the same in all layers where it is possible, regardless of the loads."""
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
