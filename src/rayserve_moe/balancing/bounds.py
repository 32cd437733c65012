"""How many replicas an expert needs, and how low the load of the hottest rank can be at best.

Loads are float64 [layers, experts], finite and not negative. A bound holds for every placement and all shares.
"""

from __future__ import annotations

import numpy as np

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
    """Lower bound of the load of the hottest rank under any placement: float64 [layers].

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
