"""A placement from nothing but loads, fast: replicas by water filling, then ranks filled in rounds.

All layers take each step together. What local search can still gain is left to it.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.bounds import replica_counts
from rayserve_moe.balancing.layout import Layout, layout_of
from rayserve_moe.balancing.levelling import level_pairs

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
    level_pairs(layout, load, rounds=LEVELLING_ROUNDS)
    return layout
