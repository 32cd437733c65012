"""The share of its expert's tokens that each slot takes, chosen to minimize the load of the hottest rank.

Shares only have to add up. So load flows between the ranks that hold the same expert, as water does between
communicating vessels, until their levels are equal or a slot is empty.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.layout import Layout


def level(layout: Layout, load: np.ndarray, *, start: np.ndarray, goal: np.ndarray, rounds: int) -> np.ndarray:
    """Split each expert's load over its slots: float64 [layers, slots], from the split `start` of the same shape.

    `load` is [layers, experts], `goal` [layers]. Stops after `rounds`, or as soon as no layer's hottest rank carries
    more than its goal; of what it comes by, each layer gets the split with the lowest peak.
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
        # A step goes on a little in the direction of the one before, which spreads levels far in few rounds.
        ahead, before = after + (turn + 1) / (turn + 4) * (after - before), after
    result = start.reshape(-1).copy()
    result[flow.slots] = best
    return result.reshape(num_layers, num_ranks * num_slots)


class _Flow:
    """The slots between which load can flow: those of experts with several replicas and with some load."""

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
        # All slots of a rank answer to its level at the same time, so each corrects its part of the difference only.
        self._pace = 1 / np.bincount(self._rank_of, minlength=self._fixed.size)[self._rank_of]
        self._weight = self._pace / self._sum_by_expert(self._pace)
        self._total = self._sum_by_expert(self.amounts)

    def ranks(self, amounts: np.ndarray) -> np.ndarray:
        """Load of every rank of every layer."""
        return self._fixed + np.bincount(self._rank_of, weights=amounts, minlength=self._fixed.size)

    def equalised(self, amounts: np.ndarray) -> np.ndarray:
        """Move load from slots on fuller ranks to slots of the same expert on emptier ones; none is left below zero."""
        levels = self.ranks(amounts)[self._rank_of]
        moved = amounts + self._pace * (self._sum_by_expert(self._weight * levels) - levels)
        np.maximum(moved, 0, out=moved)
        return moved * (self._total / self._sum_by_expert(moved))

    def _sum_by_expert(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self._expert_of, weights=values)[self._expert_of] if values.size else values
