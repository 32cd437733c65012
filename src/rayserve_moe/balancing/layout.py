"""The contents of expert slots as the planner's steps change them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement

Slot = tuple[np.ndarray, np.ndarray]
"""A slot per layer: its rank, and its index on that rank."""


@dataclass
class Layout:
    """Contents of the slots of some layers, with derived arrays. No rank holds an expert twice."""

    experts: np.ndarray
    """int [layers, ranks, slots per rank]."""
    held: np.ndarray
    """bool [layers, ranks, experts]."""
    counts: np.ndarray
    """Replicas, int [layers, experts]."""
    num_slices: int = 1
    """The ranks are divided over the slices in order, equally many on each."""

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def by_layer(self) -> np.ndarray:
        """Return the contents without the rank dimension: [layers, slots]."""
        return self.experts.reshape(self.num_layers, -1)

    def of_layers(self, layers: np.ndarray) -> Layout:
        """Copy some of the layers."""
        return Layout(self.experts[layers], self.held[layers], self.counts[layers], self.num_slices)

    def put(self, layers: np.ndarray, other: Layout) -> None:
        """Overwrite some of the layers with the layers of `other`."""
        self.experts[layers], self.held[layers], self.counts[layers] = other.experts, other.held, other.counts

    def replace(self, layers: np.ndarray, slot: Slot, *, experts: np.ndarray) -> None:
        """Put `experts` into a slot of each of `layers`, in place of an expert that has further replicas."""
        gone = self.experts[layers, *slot]
        self.experts[layers, *slot] = experts
        self.held[layers, slot[0], gone] = False
        self.held[layers, slot[0], experts] = True
        self.counts[layers, gone] -= 1
        self.counts[layers, experts] += 1

    def exchange(self, layers: np.ndarray, one: Slot, *, other: Slot) -> None:
        """Swap the contents of two slots of each of `layers`; neither rank holds the other's expert."""
        to_other, to_one = self.experts[layers, *one], self.experts[layers, *other]
        self.experts[layers, *one], self.experts[layers, *other] = to_one, to_other
        self.held[layers, one[0], to_other] = self.held[layers, other[0], to_one] = False
        self.held[layers, one[0], to_one] = self.held[layers, other[0], to_other] = True

    def even_amounts(self, load: np.ndarray) -> np.ndarray:
        """Return the load of each slot if the replicas of an expert take equal parts: [layers, slots]."""
        return np.take_along_axis(load / self.counts, self.by_layer, axis=1)

    def peaks(self, amounts: np.ndarray) -> np.ndarray:
        """Return the load of the hottest rank of each layer, if slots carry `amounts` [layers, slots]."""
        return amounts.reshape(self.experts.shape).sum(axis=2).max(axis=1)

    def hottest_other(self, ranks: np.ndarray) -> np.ndarray:
        """Return, for each slot, the maximum of `ranks` [layers, ranks] among the other holders of its expert.

        Shape [layers, ranks, slots per rank]; infinite without another holder.
        """
        num_experts = self.counts.shape[1]
        keys = (self.by_layer + num_experts * np.arange(self.num_layers)[:, None]).reshape(-1)
        values = np.repeat(ranks, self.experts.shape[2], axis=1).reshape(-1)
        result = np.full(keys.shape, np.inf)
        shared = np.flatnonzero((self.counts.reshape(-1) > 1)[keys])
        keys, values = keys[shared], values[shared]
        first, second = np.full((2, self.counts.size), -np.inf)
        np.maximum.at(first, keys, values)
        is_first = values == first[keys]
        alone = is_first & (np.bincount(keys[is_first], minlength=self.counts.size)[keys] == 1)
        np.maximum.at(second, keys[~is_first], values[~is_first])
        result[shared] = np.where(alone, second[keys], first[keys])
        return result.reshape(self.experts.shape)

    def on_slices(self, of_ranks: np.ndarray) -> np.ndarray:
        """Return, for each rank, whether `of_ranks` holds on any rank of its slice: bool [layers, ranks, ...]."""
        num_ranks = self.experts.shape[1]
        by_slice = of_ranks.reshape(len(of_ranks), self.num_slices, num_ranks // self.num_slices, *of_ranks.shape[2:])
        return np.repeat(by_slice.any(axis=2), num_ranks // self.num_slices, axis=1)

    def check_integrity(self) -> None:
        """Assert that every expert has a slot, no rank holds an expert twice, and the derived arrays agree."""
        num_experts = self.counts.shape[1]
        for experts, held, counts in zip(self.experts, self.held, self.counts, strict=True):
            assert (np.bincount(experts.reshape(-1), minlength=num_experts) == counts).all(), "counts are wrong"
            assert counts.all(), "an expert has no slot"
            assert (held.sum(axis=1) == experts.shape[1]).all(), "a rank holds an expert twice"
            assert np.take_along_axis(held, experts, axis=1).all(), "held is wrong"


def layout_of(experts: np.ndarray, num_experts: int) -> Layout:
    """Build a layout from `experts` [layers, ranks, slots per rank], which it takes over."""
    num_layers, num_ranks, _ = experts.shape
    held = np.zeros((num_layers, num_ranks, num_experts), np.bool_)
    held[np.arange(num_layers)[:, None, None], np.arange(num_ranks)[:, None], experts] = True
    keys = experts.reshape(num_layers, -1) + num_experts * np.arange(num_layers)[:, None]
    counts = np.bincount(keys.reshape(-1), minlength=num_layers * num_experts).reshape(num_layers, num_experts)
    return Layout(experts, held, counts)


def coldest_other(layout: Layout, ranks: np.ndarray) -> np.ndarray:
    """Return, for each slot, the minimum of `ranks` among the other holders of its expert; infinite without any."""
    lowest = layout.hottest_other(-ranks)
    return np.where(np.isinf(lowest), np.inf, -lowest)


def min_locations(values: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return the minimum of each layer and its indices: `values` [layers, ...]; ties go to the first."""
    flat = values.reshape(len(values), values[0].size)
    place = flat.argmin(axis=1)
    return flat[np.arange(len(flat)), place], np.unravel_index(place, values.shape[1:])


def carried_over(previous: ExpertPlacement, load: np.ndarray, *, ep_size: int, slots_per_rank: int) -> Layout:
    """Lay out `ep_size` ranks of `slots_per_rank` slots such that ranks keep the experts that they hold in `previous`.

    Rank i is rank i of `previous`; further ranks start empty. Replicas are dropped if slots are short. Experts without
    a slot are placed first, hottest to the emptiest rank; then free slots get replicas of the experts that need them
    most.
    """
    shape = previous.num_layers, previous.ep_size, previous.slots_per_rank
    experts = [
        _carried_layer(of_ranks[:ep_size], of_layer, ep_size=ep_size, slots_per_rank=slots_per_rank)
        for of_ranks, of_layer in zip(previous.expert_of_slot.reshape(shape).tolist(), load, strict=True)
    ]
    return layout_of(np.array(experts, np.int64), previous.num_experts)


def num_incoming(experts: np.ndarray, previous: ExpertPlacement) -> int:
    """Count slots of `experts` [layers, ranks, slots per rank] whose expert their rank does not hold in `previous`."""
    num_layers, num_ranks, _ = experts.shape
    old = previous.expert_of_slot.reshape(num_layers, previous.ep_size, -1)[:, :num_ranks]
    held = np.zeros((num_layers, num_ranks, previous.num_experts), np.bool_)
    held[np.arange(num_layers)[:, None, None], np.arange(old.shape[1])[:, None], old] = True
    return int(np.count_nonzero(~np.take_along_axis(held, experts, axis=2)))


def _carried_layer(
    old_ranks: list[list[int]], load: np.ndarray, *, ep_size: int, slots_per_rank: int
) -> list[list[int]]:
    ranks = [list(dict.fromkeys(held)) for held in old_ranks]
    ranks += [[] for _ in range(ep_size - len(ranks))]
    counts = np.zeros(len(load), np.int64)
    for held in ranks:
        counts[held] += 1
    for held in ranks:
        while len(held) > slots_per_rank:
            _drop(held, counts, load)
    _free_slots(ranks, counts, load, slots_per_rank)
    missing = np.flatnonzero(counts == 0)
    for expert in missing[np.argsort(-load[missing], kind="stable")]:
        held = _emptiest(ranks, counts, load, slots_per_rank)
        held.append(int(expert))
        counts[expert] += 1
    while any(len(held) < slots_per_rank for held in ranks):
        held = _emptiest(ranks, counts, load, slots_per_rank)
        per_replica = load / counts
        per_replica[held] = -1
        held.append(int(per_replica.argmax()))
        counts[held[-1]] += 1
    return ranks


def _free_slots(ranks: list[list[int]], counts: np.ndarray, load: np.ndarray, slots_per_rank: int) -> None:
    """Drop redundant replicas until the experts without a slot fit."""
    while np.count_nonzero(counts == 0) > sum(slots_per_rank - len(held) for held in ranks):
        spare = [held for held in ranks if (counts[held] > 1).any()]
        _drop(min(spare, key=lambda held: min(_loss(held, counts, load))), counts, load)


def _drop(held: list[int], counts: np.ndarray, load: np.ndarray) -> None:
    losses = _loss(held, counts, load)
    gone = held.pop(losses.index(min(losses)))
    counts[gone] -= 1


def _loss(held: list[int], counts: np.ndarray, load: np.ndarray) -> list[tuple[bool, float]]:
    """Return the cost of dropping each expert of a rank: experts without a further replica cost most, then by load."""
    return [(bool(counts[expert] == 1), float(load[expert] / counts[expert])) for expert in held]


def _emptiest(ranks: list[list[int]], counts: np.ndarray, load: np.ndarray, slots_per_rank: int) -> list[int]:
    """Return the rank with a free slot that has the minimum load."""
    free = [held for held in ranks if len(held) < slots_per_rank]
    return min(free, key=lambda held: float((load[held] / np.maximum(counts[held], 1)).sum()))
