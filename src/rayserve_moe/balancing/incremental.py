"""From a placement to one that balances another load, moving few experts.

Shares are levelled first, which moves nothing. Then the hottest rank of each layer gives load away by the move that
relieves it most per expert moved, until the layer is close enough. All layers take each step together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.layout import Layout, Slot, coldest_other, least_places
from rayserve_moe.balancing.shares import level

FIRST_ROUNDS, ROUNDS = 32, 12
RANKS_TRIED = 8
GAIN = 1e-5  # the least part of its load by which a move must relieve the hottest rank


@dataclass(frozen=True)
class _Moves:
    """The best move of each layer: exchange a slot of the hottest rank with another, or replicate its expert there."""

    peak: np.ndarray
    after: np.ndarray
    is_exchange: np.ndarray
    hot_slot: Slot
    other: Slot

    @property
    def cost(self) -> np.ndarray:
        """Experts that change rank."""
        return np.where(self.is_exchange, 2, 1)

    def of(self, layers: np.ndarray) -> tuple[Slot, Slot]:
        """The two slots in some of the layers."""
        (rank, place), (other_rank, other_place) = self.hot_slot, self.other
        return (rank[layers], place[layers]), (other_rank[layers], other_place[layers])


def rebalance(
    layout: Layout, load: np.ndarray, *, amounts: np.ndarray, goal: np.ndarray, budget: float = np.inf
) -> np.ndarray:
    """Change `layout` until no rank of a layer carries more than `goal` [layers], no move helps, or `budget` is spent.

    `load` is [layers, experts]; `amounts` [layers, slots] says how it is split over the slots, and so does what is
    returned. The budget counts experts that change rank; the hottest layers spend it first.
    """
    amounts = level(layout, load, start=amounts, goal=goal, rounds=FIRST_ROUNDS)
    most_tried = min(RANKS_TRIED, layout.experts.shape[1])
    tried = np.zeros(layout.num_layers, np.int64)
    while (layers := np.flatnonzero((layout.peaks(amounts) > goal) & (tried < most_tried))).size:
        part = layout.of_layers(layers)
        items = amounts[layers].reshape(part.experts.shape)
        moves = _best_moves(part, items, goal=goal[layers], which=tried[layers])
        helps = _affordable(moves, goal[layers], budget)
        # Ranks that share experts are equally hot: where the first of them finds no move, another may.
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
    """Layers whose move helps, as far as the budget reaches, the hottest first."""
    helps = (moves.peak > goal) & (moves.after < moves.peak * (1 - GAIN))
    hottest_first = np.argsort(-moves.peak / goal, kind="stable")
    spent = np.cumsum((moves.cost * helps)[hottest_first])
    within = np.empty_like(helps)
    within[hottest_first] = spent <= budget
    return helps & within


def _best_moves(layout: Layout, items: np.ndarray, *, goal: np.ndarray, which: np.ndarray) -> _Moves:
    """Find the best move of the `which`-th hottest rank of each layer.

    Judge moves by the load that stays on the ranks they touch before shares are levelled again.
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
    replicated, replica_places = least_places(after)
    after = np.maximum(wide_peak - hot_items + items[:, None], rest + hot_items)
    after[has_hot] = np.inf
    taken = np.take_along_axis(layout.held[layers, hottest], layout.by_layer, axis=1).reshape(items.shape)
    after[np.broadcast_to(taken[:, None], after.shape)] = np.inf
    exchanged, exchange_places = least_places(after)
    # Two experts have to move for an exchange, so it has to relieve twice as much; more than to the goal is no gain.
    is_exchange = (peak - np.maximum(exchanged, goal)) / 2 > peak - np.maximum(replicated, goal)
    place, rank, other = (np.where(is_exchange, a, b) for a, b in zip(exchange_places, replica_places, strict=True))
    after = np.where(is_exchange, exchanged, replicated)
    return _Moves(peak, after, is_exchange, hot_slot=(hottest, place), other=(rank, other))


def _apply(layout: Layout, items: np.ndarray, moves: _Moves, helps: np.ndarray) -> None:
    """Carry the moves out on `layout` and on the loads of its slots, `items`."""
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
    # What the replaced replica carried goes to the coldest rank that still holds its expert.
    holders = np.where(layout.experts[layers] == gone[:, None, None], ranks[:, :, None], np.inf)
    _, heir = least_places(holders)
    rest = ranks[np.arange(len(layers)), other[0]] - freed
    given = np.clip((moves.peak[layers] - rest) / 2, 0, items[layers, *hot])
    items[layers, *hot] -= given
    items[layers, *other] = given
    items[layers, *heir] += freed
