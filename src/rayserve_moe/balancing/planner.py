"""The planner: computes a placement from tokens per expert that minimizes the load of the hottest rank.

The problem is the one that DeepSeek's EPLB solves. A first placement comes from loads alone: replicas of hot experts by
water filling, then ranks filled in rounds, then exchanges in pairs. Local search and unequal shares (`incremental`)
bring the hottest rank within a tolerance of its lower bound.

It knows only loads and slots: no devices, no clocks, no statistics. The same input gives the same placement everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.incremental import FIRST_ROUNDS, level, rebalance, refine
from rayserve_moe.balancing.layout import Layout, carried_over, layout_of, num_incoming
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, lowered_redundancy, placement_from

FRESH_GOAL = 1.002  # relative to the bound: goal of levelling if any expert may move
ROUNDING = 1e-6  # shares are float32
LEVELLING_ROUNDS = 2  # of exchanges in pairs in a first placement
BISECTIONS = 24  # of the load per replica


def plan(
    load: np.ndarray,
    *,
    ep_size: int,
    num_redundant: int,
    previous: ExpertPlacement | None = None,
    slot_budget: int | None = None,
    tolerance: float = 0.02,
) -> ExpertPlacement:
    """Place the experts of every layer for `load` [layers, experts]: tokens or a measure of them, of any number type.

    `num_redundant` is lowered until `ep_size` divides the slots; the placement has the resulting number. Without
    `previous` everything is placed anew. With it, a layer whose hottest rank carries at most 1 + `tolerance` times its
    lower bound stays unchanged. In other layers shares change first, then as few experts move as necessary; over all
    layers at most `slot_budget` slots get an expert that their rank did not hold.

    `previous` may have other ranks: rank i of the new ranks holds the experts of rank i of the old ones. Raises
    PlacementError for numbers that do not fit, and for a budget below the moves that other ranks force.
    """
    given = np.asarray(load)
    redundant = _check(given, ep_size, num_redundant, previous)
    if tolerance < 0 or (slot_budget is not None and slot_budget < 0):
        raise PlacementError("a tolerance or a slot budget is negative")
    scaled = _scaled(given)
    budget = np.inf if slot_budget is None else slot_budget
    slots_per_rank = (given.shape[1] + redundant) // ep_size
    if slots_per_rank >= given.shape[1]:
        return _everywhere(scaled.shape, slots_per_rank, ep_size=ep_size, previous=previous, budget=budget)
    if previous is None:
        return _fresh(scaled, ep_size, redundant)
    return _from_previous(scaled, previous, ep_size=ep_size, redundant=redundant, budget=budget, tolerance=tolerance)


def replan(
    load: np.ndarray, previous: ExpertPlacement, *, tolerance: float = 0.02, num_slices: int = 1
) -> ExpertPlacement:
    """Plan like `plan` from `previous` for the same ranks, which are divided over `num_slices` in order.

    Experts move within slices unless a move between slices relieves the hottest rank several times as much. A layer
    that stays above its goal is planned again as if all ranks were on a single slice, with the same balance. Raises
    PlacementError if the slices do not divide the ranks.
    """
    if num_slices < 1 or previous.ep_size % num_slices:
        raise PlacementError(f"{previous.ep_size} ranks do not spread evenly over {num_slices} slices")
    ep_size, num_redundant = previous.ep_size, previous.num_redundant
    if num_slices == 1 or previous.slots_per_rank >= previous.num_experts:
        return plan(load, ep_size=ep_size, num_redundant=num_redundant, previous=previous, tolerance=tolerance)
    given = np.asarray(load)
    _check(given, ep_size, num_redundant, previous)
    scaled = _scaled(given)
    goal = (1 + tolerance) * lower_bound(scaled, ep_size=ep_size, num_redundant=num_redundant)
    layout, shares = _as_before(previous)
    layout.num_slices = num_slices
    return _rebalanced(layout, scaled, shares=shares, goal=goal, budget=np.inf)


def first_placement(load: np.ndarray, *, ep_size: int, num_redundant: int) -> ExpertPlacement:
    """Place everything anew in a single fast pass, with equal shares and without any search."""
    given = np.asarray(load)
    redundant = _check(given, ep_size, num_redundant, None)
    num_experts = given.shape[1]
    slots_per_rank = (num_experts + redundant) // ep_size
    if slots_per_rank >= num_experts:
        return _everywhere(given.shape, slots_per_rank, ep_size=ep_size)
    layout = first_layout(_spread(_scaled(given)), ep_size=ep_size, slots_per_rank=slots_per_rank)
    return placement_from(layout.by_layer, None, num_experts=num_experts, ep_size=ep_size)


def _check(load: np.ndarray, ep_size: int, num_redundant: int, previous: ExpertPlacement | None) -> int:
    """Reject invalid input; return the number of redundant slots that fits."""
    if load.ndim != 2 or not load.size or load.dtype.kind not in "buif":
        raise PlacementError(f"load is {load.dtype} of shape {load.shape}, not numbers of [layers, experts]")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise PlacementError("a load is negative or not a number")
    if ep_size < 1:
        raise PlacementError(f"experts do not spread over {ep_size} devices")
    if previous is not None and (previous.num_layers, previous.num_experts) != load.shape:
        raise PlacementError(
            f"the previous placement has {previous.num_layers} layers of {previous.num_experts} experts, "
            f"the load {load.shape[0]} of {load.shape[1]}"
        )
    return lowered_redundancy(load.shape[1], ep_size=ep_size, wanted=num_redundant)


def _scaled(load: np.ndarray) -> np.ndarray:
    """Return the load as float64 with a maximum of 1 in every layer, or 0 in a layer without load."""
    load = load.astype(np.float64)
    largest = load.max(axis=1, keepdims=True)
    return load / np.where(largest > 0, largest, 1)


def _spread(load: np.ndarray) -> np.ndarray:
    """Return the load, with equally popular experts in layers without load."""
    return np.where(load.any(axis=1, keepdims=True), load, 1.0)


def _fresh(load: np.ndarray, ep_size: int, redundant: int) -> ExpertPlacement:
    """Place anew, hottest expert first, so that the result does not depend on the numbering of experts."""
    load = _spread(load)
    order = np.argsort(-load, axis=1, kind="stable")
    load = np.take_along_axis(load, order, axis=1)
    bound = lower_bound(load, ep_size=ep_size, num_redundant=redundant)
    layout = first_layout(load, ep_size=ep_size, slots_per_rank=(load.shape[1] + redundant) // ep_size)
    refine(layout, load, bound=bound)
    amounts = level(layout, load, start=layout.even_amounts(load), goal=bound, rounds=FIRST_ROUNDS)
    _move_for_shares(layout, load, amounts, goal=FRESH_GOAL * bound)
    shares = _shares(layout, load, amounts)
    experts = np.take_along_axis(order, layout.by_layer, axis=1)
    return placement_from(experts, shares, num_experts=load.shape[1], ep_size=ep_size)


def _move_for_shares(layout: Layout, load: np.ndarray, amounts: np.ndarray, *, goal: np.ndarray) -> None:
    """Move experts if shares alone do not reach `goal`, unless equal shares lose more by it than `amounts` gain."""
    layers = np.flatnonzero(layout.peaks(amounts) > goal)
    if not layers.size:
        return
    part = layout.of_layers(layers)
    moved = rebalance(part, load[layers], amounts=amounts[layers], goal=goal[layers])
    gained = layout.peaks(amounts)[layers] - part.peaks(moved)
    lost = part.peaks(part.even_amounts(load[layers])) - layout.peaks(layout.even_amounts(load))[layers]
    kept = lost <= gained
    layout.put(layers[kept], part.of_layers(kept))
    amounts[layers[kept]] = moved[kept]


def _from_previous(
    load: np.ndarray, previous: ExpertPlacement, *, ep_size: int, redundant: int, budget: float, tolerance: float
) -> ExpertPlacement:
    slots_per_rank = (load.shape[1] + redundant) // ep_size
    goal = (1 + tolerance) * lower_bound(load, ep_size=ep_size, num_redundant=redundant)
    if (previous.ep_size, previous.slots_per_rank) == (ep_size, slots_per_rank):
        layout, shares = _as_before(previous)
    else:
        layout = carried_over(previous, load, ep_size=ep_size, slots_per_rank=slots_per_rank)
        shares = layout.even_amounts(np.ones_like(load))
        budget = _rest_of_budget(budget, layout.experts, previous)
    return _rebalanced(layout, load, shares=shares, goal=goal, budget=budget)


def _as_before(previous: ExpertPlacement) -> tuple[Layout, np.ndarray]:
    """Return a placement as a layout, and its shares [layers, slots]."""
    shape = previous.num_layers, previous.ep_size, previous.slots_per_rank
    experts = previous.expert_of_slot.reshape(shape).astype(np.int64)
    return layout_of(experts, previous.num_experts), previous.share_of_slot.astype(np.float64)


def _rebalanced(
    layout: Layout, load: np.ndarray, *, shares: np.ndarray, goal: np.ndarray, budget: float
) -> ExpertPlacement:
    """Return the placement that `rebalance` finds from a layout with `shares`."""
    amounts = shares * np.take_along_axis(load, layout.by_layer, axis=1)
    layers = np.flatnonzero(layout.peaks(amounts) > goal * (1 + ROUNDING))
    if layers.size:
        part = layout.of_layers(layers)
        levelled = rebalance(part, load[layers], amounts=amounts[layers], goal=goal[layers], budget=budget)
        if layout.num_slices > 1:
            _open_slices(
                part, levelled, load[layers], start=(layout.of_layers(layers), amounts[layers]), goal=goal[layers]
            )
        layout.put(layers, part)
        shares[layers] = _shares(part, load[layers], levelled)
    return placement_from(layout.by_layer, shares, num_experts=load.shape[1], ep_size=layout.experts.shape[1])


def _open_slices(
    layout: Layout, amounts: np.ndarray, load: np.ndarray, *, start: tuple[Layout, np.ndarray], goal: np.ndarray
) -> None:
    """Balance layers above their goal again from the `start`, as if all ranks were on a single slice.

    Better results are stored in `layout` and its `amounts`.
    """
    layers = np.flatnonzero(layout.peaks(amounts) > goal * (1 + ROUNDING))
    if not layers.size:
        return
    anywhere = replace(start[0].of_layers(layers), num_slices=1)
    found = rebalance(anywhere, load[layers], amounts=start[1][layers], goal=goal[layers])
    better = anywhere.peaks(found) < layout.peaks(amounts)[layers]
    layout.put(layers[better], anywhere.of_layers(better))
    amounts[layers[better]] = found[better]


def _shares(layout: Layout, load: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Return the fractions of each expert's load; equal fractions without load."""
    whole = np.take_along_axis(load, layout.by_layer, axis=1)
    return np.where(whole > 0, amounts / np.where(whole > 0, whole, 1), layout.even_amounts(np.ones_like(load)))


def _everywhere(
    shape: tuple[int, ...],
    slots_per_rank: int,
    *,
    ep_size: int,
    previous: ExpertPlacement | None = None,
    budget: float = np.inf,
) -> ExpertPlacement:
    """Return a placement in which every rank holds all experts, so that any load is balanced."""
    num_layers, num_experts = shape
    experts = np.broadcast_to(np.arange(slots_per_rank) % num_experts, (num_layers, ep_size, slots_per_rank))
    if previous is not None:
        _rest_of_budget(budget, experts, previous)
        if (previous.ep_size, previous.slots_per_rank) == experts.shape[1:] and not num_incoming(experts, previous):
            experts = previous.expert_of_slot.reshape(experts.shape)
    on_rank = (experts[..., None] == np.arange(num_experts)).sum(axis=2)
    shares = 1 / ep_size / np.take_along_axis(on_rank, experts, axis=2)
    flat = experts.reshape(num_layers, -1)
    return placement_from(flat, shares.reshape(num_layers, -1), num_experts=num_experts, ep_size=ep_size)


def _rest_of_budget(budget: float, experts: np.ndarray, previous: ExpertPlacement) -> float:
    """Return the rest of the budget after the forced changes to `experts`."""
    forced = num_incoming(experts, previous)
    if forced > budget:
        raise PlacementError(f"other ranks force {forced} slots to change, more than the slot budget")
    return budget - forced


def first_layout(load: np.ndarray, *, ep_size: int, slots_per_rank: int) -> Layout:
    """Fill the slots of every layer for `load` [layers, experts]; a rank has fewer slots than experts exist.

    Replicas, heaviest first, are dealt out in rounds of one per rank; the heaviest of a round goes to the rank with the
    minimum load. A few rounds of exchanges between hot and cold ranks level the rest.
    """
    num_layers, num_experts = load.shape
    counts = replica_counts(load, num_slots=ep_size * slots_per_rank, max_replicas=ep_size)
    each = load / counts
    order = np.argsort(-each, axis=1, kind="stable")
    dealt = np.repeat(order.reshape(-1), np.take_along_axis(counts, order, axis=1).reshape(-1))
    dealt = dealt.reshape(num_layers, slots_per_rank, ep_size)
    weights = np.take_along_axis(each, dealt.reshape(num_layers, -1), axis=1).reshape(dealt.shape)
    experts = np.empty((num_layers, ep_size, slots_per_rank), np.int64)
    experts[:, :, 0] = dealt[:, 0]
    rank_load = weights[:, 0].copy()
    for turn in range(1, slots_per_rank):
        # An expert whose replicas did not all fit into the last round comes first in this round; its holders go last.
        holders = experts[:, :, turn - 1] == dealt[:, turn, :1]
        ranks = np.lexsort((rank_load, holders), axis=1)
        np.put_along_axis(experts[:, :, turn], ranks, dealt[:, turn], axis=1)
        received = np.empty_like(rank_load)
        np.put_along_axis(received, ranks, weights[:, turn], axis=1)
        rank_load += received
    layout = layout_of(experts, num_experts)
    _level_pairs(layout, load, rounds=LEVELLING_ROUNDS)
    return layout


def _level_pairs(layout: Layout, load: np.ndarray, *, rounds: int) -> None:
    """Exchange a replica between hot and cold ranks in pairs, `rounds` times, wherever their loads become closer.

    In the first round the coldest rank is paired with the hottest, the second coldest with the second hottest, and so
    on; every further round shifts the hot ranks by one. `load` is [layers, experts]; replicas share evenly.
    """
    num_layers, num_ranks, num_slots = layout.experts.shape
    half = num_ranks // 2
    items = layout.even_amounts(load).reshape(layout.experts.shape)
    layers = np.arange(num_layers)[:, None]
    for turn in range(rounds):
        order = np.argsort(items.sum(axis=2), axis=1, kind="stable")
        cold, hot = order[:, :half], np.roll(order[:, num_ranks - half :][:, ::-1], turn, axis=1)
        cold_items, hot_items = items[layers, cold], items[layers, hot]
        gap = (hot_items.sum(axis=2) - cold_items.sum(axis=2)) / 2
        left = abs(gap[..., None, None] - (hot_items[..., :, None] - cold_items[..., None, :]))
        left[layout.held[layers[..., None], cold[..., None], layout.experts[layers, hot]]] = np.inf
        taken = layout.held[layers[..., None], hot[..., None], layout.experts[layers, cold]]
        np.swapaxes(left, 2, 3)[taken] = np.inf
        flat = left.reshape(num_layers, half, -1)
        best = flat.argmin(axis=2)
        layer, pair = np.nonzero(np.take_along_axis(flat, best[..., None], axis=2)[..., 0] < gap * (1 - 1e-9))
        i, j = np.divmod(best[layer, pair], num_slots)
        hot_slot, cold_slot = (hot[layer, pair], i), (cold[layer, pair], j)
        layout.exchange(layer, hot_slot, other=cold_slot)
        items[layer, *hot_slot] = cold_items[layer, pair, j]
        items[layer, *cold_slot] = hot_items[layer, pair, i]


def replica_counts(load: np.ndarray, *, num_slots: int, max_replicas: int) -> np.ndarray:
    """Give every expert 1 to `max_replicas` of a layer's slots to minimize the maximum load per replica, by water
    filling.

    Returns int [layers, experts] that add up to `num_slots` in every layer. Ties are served in expert order.
    """
    assert load.shape[1] <= num_slots <= load.shape[1] * max_replicas, (
        f"{num_slots} slots for experts of 1 to {max_replicas} replicas"
    )
    high = load.max(axis=1, keepdims=True)
    low = np.maximum(high / max_replicas, load.sum(axis=1, keepdims=True) / num_slots)
    high, low = np.where(high > 0, high, 1.0), np.where(high > 0, low, 1.0)
    for _ in range(BISECTIONS):
        level = (low + high) / 2
        fits = _counts_at(load, level, max_replicas).sum(axis=1, keepdims=True) <= num_slots
        low, high = np.where(fits, low, level), np.where(fits, level, high)
    counts = _counts_at(load, high, max_replicas)
    spare = num_slots - counts.sum(axis=1)
    while (layers := np.flatnonzero(spare)).size:
        per_replica = np.where(counts[layers] < max_replicas, load[layers] / counts[layers], -1.0)
        counts[layers, per_replica.argmax(axis=1)] += 1
        spare[layers] -= 1
    return counts


def lower_bound(load: np.ndarray, *, ep_size: int, num_redundant: int) -> np.ndarray:
    """Return a lower bound of the hottest rank's load under any placement and all shares: float64 [layers].

    It is the mean rank load, or the load per replica of the expert that stays hottest under the best replication.
    Without redundant slots every expert is on a single rank, and the hottest experts must share ranks.
    """
    num_experts = load.shape[1]
    num_slots = num_experts + num_redundant
    # Replicas beyond one per rank add nothing: an expert on every rank adds only the mean to each.
    max_replicas = max(ep_size, -(-num_slots // num_experts))
    counts = replica_counts(load, num_slots=num_slots, max_replicas=max_replicas)
    bound = np.maximum(load.sum(axis=1) / ep_size, (load / counts).max(axis=1))
    return bound if num_redundant else np.maximum(bound, _pigeonhole_bound(load, ep_size))


def _counts_at(load: np.ndarray, level: np.ndarray, max_replicas: int) -> np.ndarray:
    """Return the replicas of every expert, up to `max_replicas`, that bring its load per replica to `level` or less."""
    return np.clip(np.ceil(load / level), 1, max_replicas).astype(np.int64)


def _pigeonhole_bound(load: np.ndarray, ep_size: int) -> np.ndarray:
    """Return a bound of the peak: a rank holds k + 1 of the k * ranks + 1 hottest experts, and the coldest ones."""
    num_experts = load.shape[1]
    slots_per_rank = num_experts // ep_size
    ordered = -np.sort(-load, axis=1)
    below = np.concatenate([np.zeros((len(load), 1)), np.cumsum(ordered[:, ::-1], axis=1)], axis=1)
    bounds = [
        ordered[:, k * ep_size - k : k * ep_size + 1].sum(axis=1) + below[:, slots_per_rank - k - 1]
        for k in range(slots_per_rank)
    ]
    return np.max(bounds, axis=0)
