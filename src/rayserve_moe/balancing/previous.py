"""Carries a placement over to other ranks, or to other numbers of slots per rank."""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.layout import Layout, layout_of
from rayserve_moe.balancing.placement import ExpertPlacement


def carried_over(previous: ExpertPlacement, load: np.ndarray, *, ep_size: int, slots_per_rank: int) -> Layout:
    """Lay out `ep_size` ranks of `slots_per_rank` slots such that ranks keep what they hold in `previous`.

    Rank i is rank i of `previous`; further ones start empty. Experts without a slot are placed first, hottest
    to the emptiest, then free slots get replicas of the experts that need them most. Replicas go where slots are short.
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
    """Drop replicas that can be spared until the experts without a slot find one."""
    while np.count_nonzero(counts == 0) > sum(slots_per_rank - len(held) for held in ranks):
        spare = [held for held in ranks if (counts[held] > 1).any()]
        _drop(min(spare, key=lambda held: min(_loss(held, counts, load))), counts, load)


def _drop(held: list[int], counts: np.ndarray, load: np.ndarray) -> None:
    losses = _loss(held, counts, load)
    gone = held.pop(losses.index(min(losses)))
    counts[gone] -= 1


def _loss(held: list[int], counts: np.ndarray, load: np.ndarray) -> list[tuple[bool, float]]:
    """How much each expert of a rank would be missed: those without a further replica most, then by load."""
    return [(bool(counts[expert] == 1), float(load[expert] / counts[expert])) for expert in held]


def _emptiest(ranks: list[list[int]], counts: np.ndarray, load: np.ndarray, slots_per_rank: int) -> list[int]:
    """Of the ranks with a free slot, that which carries least."""
    free = [held for held in ranks if len(held) < slots_per_rank]
    return min(free, key=lambda held: float((load[held] / np.maximum(counts[held], 1)).sum()))
