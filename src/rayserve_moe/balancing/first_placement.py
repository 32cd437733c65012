"""A first placement from loads alone: replicas by water filling, then ranks filled in rounds, then pairwise exchanges.

Replicating hot experts and packing the heaviest first onto the least loaded rank is the scheme of DeepSeek's EPLB. All
layers are computed together; local search (`refinement`) improves the result. Loads are float64 [layers, experts],
finite and not negative.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.layout import Layout, layout_of

LEVELLING_ROUNDS = 2


def first_layout(load: np.ndarray, *, ep_size: int, slots_per_rank: int) -> Layout:
    """Fill the slots of every layer for `load` [layers, experts]; a rank has fewer slots than there are experts.

    Replicas, heaviest first, are dealt out in rounds of one per rank, the heaviest of a round to the rank that has
    least. A few rounds of exchanges between hot and cold ranks level what that leaves.
    """
    num_layers, num_experts = load.shape
    counts = replica_counts(load, num_slots=ep_size * slots_per_rank, most=ep_size)
    each = load / counts
    order = np.argsort(-each, axis=1, kind="stable")
    dealt = np.repeat(order.reshape(-1), np.take_along_axis(counts, order, axis=1).reshape(-1))
    dealt = dealt.reshape(num_layers, slots_per_rank, ep_size)
    weights = np.take_along_axis(each, dealt.reshape(num_layers, -1), axis=1).reshape(dealt.shape)
    experts = np.empty((num_layers, ep_size, slots_per_rank), np.int64)
    experts[:, :, 0] = dealt[:, 0]
    rank_load = weights[:, 0].copy()
    for turn in range(1, slots_per_rank):
        # An expert whose replicas did not all fit into the last round comes first in this one: its holders wait.
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
    """Let hot and cold ranks exchange one replica in pairs, `rounds` times, wherever their loads become closer.

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


BISECTIONS = 24


def replica_counts(load: np.ndarray, *, num_slots: int, most: int) -> np.ndarray:
    """Give every expert 1 to `most` of a layer's slots to minimize the greatest load per replica, by water filling.

    Returns int [layers, experts] that add up to `num_slots` in every layer. Equal loads are served in expert order.
    """
    assert load.shape[1] <= num_slots <= load.shape[1] * most, f"{num_slots} slots for experts of 1 to {most} replicas"
    high = load.max(axis=1, keepdims=True)
    low = np.maximum(high / most, load.sum(axis=1, keepdims=True) / num_slots)
    high, low = np.where(high > 0, high, 1.0), np.where(high > 0, low, 1.0)
    for _ in range(BISECTIONS):
        level = (low + high) / 2
        fits = _counts_at(load, level, most).sum(axis=1, keepdims=True) <= num_slots
        low, high = np.where(fits, low, level), np.where(fits, level, high)
    counts = _counts_at(load, high, most)
    spare = num_slots - counts.sum(axis=1)
    while (layers := np.flatnonzero(spare)).size:
        per_replica = np.where(counts[layers] < most, load[layers] / counts[layers], -1.0)
        counts[layers, per_replica.argmax(axis=1)] += 1
        spare[layers] -= 1
    return counts


def lower_bound(load: np.ndarray, *, ep_size: int, num_redundant: int) -> np.ndarray:
    """Lower bound of the load of the hottest rank under any placement and all shares: float64 [layers].

    It is the mean rank load, or the load per replica of the expert that stays hottest under the best replication.
    Without redundant slots every expert lies whole on one rank, and the hottest experts have to share ranks.
    """
    num_experts = load.shape[1]
    num_slots = num_experts + num_redundant
    # No more replicas than ranks: an expert on every rank adds no more than the mean to each.
    most = max(ep_size, -(-num_slots // num_experts))
    counts = replica_counts(load, num_slots=num_slots, most=most)
    bound = np.maximum(load.sum(axis=1) / ep_size, (load / counts).max(axis=1))
    return bound if num_redundant else np.maximum(bound, _pigeonhole_bound(load, ep_size))


def _counts_at(load: np.ndarray, level: np.ndarray, most: int) -> np.ndarray:
    """Replicas of every expert, at most `most`, with which its load per replica is `level` or less."""
    return np.clip(np.ceil(load / level), 1, most).astype(np.int64)


def _pigeonhole_bound(load: np.ndarray, ep_size: int) -> np.ndarray:
    """Of the k * ranks + 1 hottest experts some rank holds k + 1; the rest of its slots hold the coldest at best."""
    num_experts = load.shape[1]
    slots_per_rank = num_experts // ep_size
    ordered = -np.sort(-load, axis=1)
    below = np.concatenate([np.zeros((len(load), 1)), np.cumsum(ordered[:, ::-1], axis=1)], axis=1)
    bounds = [
        ordered[:, k * ep_size - k : k * ep_size + 1].sum(axis=1) + below[:, slots_per_rank - k - 1]
        for k in range(slots_per_rank)
    ]
    return np.max(bounds, axis=0)
