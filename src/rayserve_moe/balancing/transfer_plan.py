"""Where each slot of a new placement gets its weights from.

All moves of a layer happen at the same time: every slot reads what its source held before any slot was written. So a
slot may be read by some and overwritten by another.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError


def transfer_sources(old: ExpertPlacement, new: ExpertPlacement, *, hosts: int) -> np.ndarray:
    """Return for every slot the slot that holds its next expert now: int32 [layers, slots].

    That is the slot itself, or else one of its rank, its host, or another host. The ranks lie over `hosts` in order,
    equally many on each. Of equally near ranks the one that has the least to send in that layer is taken.
    PlacementError where the placements are of different shapes.
    """
    check_alike(old, new)
    if hosts < 1 or old.ep_size % hosts:
        raise PlacementError(f"{old.ep_size} ranks do not spread evenly over {hosts} hosts")
    slots = np.arange(old.num_slots, dtype=np.int32)
    sources = np.where(old.expert_of_slot == new.expert_of_slot, slots, _own_rank_sources(old, new))
    ranks_per_host = old.ep_size // hosts
    for layer in np.flatnonzero((sources < 0).any(axis=1)):
        _choose_senders(
            sources[layer],
            old.expert_of_slot[layer],
            new.expert_of_slot[layer],
            slots_per_rank=old.slots_per_rank,
            slots_per_host=ranks_per_host * old.slots_per_rank,
        )
    return sources


def check_alike(old: ExpertPlacement, new: ExpertPlacement) -> None:
    """Raise PlacementError where two placements are of different layers, slots or ranks."""
    if old.expert_of_slot.shape != new.expert_of_slot.shape or old.slot_for.shape != new.slot_for.shape:
        raise PlacementError("the placements are of different layers, slots or ranks")


def _own_rank_sources(old: ExpertPlacement, new: ExpertPlacement) -> np.ndarray:
    """The slot of its own rank that holds a slot's next expert, or -1: int32 [layers, slots]."""
    layers = np.arange(old.num_layers)[:, None]
    slots = np.arange(old.num_slots, dtype=np.int32)
    ranks = slots // old.slots_per_rank
    place = np.full((old.num_layers, old.ep_size, old.num_experts), -1, np.int32)
    place[layers, ranks, old.expert_of_slot] = slots
    return place[layers, ranks, new.expert_of_slot]


def _choose_senders(
    sources: np.ndarray, old: np.ndarray, new: np.ndarray, *, slots_per_rank: int, slots_per_host: int
) -> None:
    """Fill in the sources of one layer that are still -1."""
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.tolist()):
        holders.setdefault(expert, []).append(slot)
    num_sent = [0] * (len(old) // slots_per_rank)
    for target in np.flatnonzero(sources < 0).tolist():
        host = target // slots_per_host
        source = min(
            holders[int(new[target])],
            key=lambda slot: (slot // slots_per_host != host, num_sent[slot // slots_per_rank], slot),
        )
        num_sent[source // slots_per_rank] += 1
        sources[target] = source
