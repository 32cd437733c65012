"""How weights get from one placement to the next: who sends which slot to whom.

All moves of a layer happen at the same time: every slot reads what its source held before any slot was written. So
layers can be done in chunks of any size, and a slot may be read by some and overwritten by another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """For every slot of every layer the slot that holds its next expert now: `source_of_slot` int32 [layers, slots].

    A slot that keeps its expert is its own source.
    """

    source_of_slot: np.ndarray
    ep_size: int

    @property
    def is_copied(self) -> np.ndarray:
        """Slots that read another slot of their own rank: bool [layers, slots]."""
        return self._reads_another & (self._source_rank == self._rank)

    @property
    def is_sent(self) -> np.ndarray:
        """Slots whose expert comes from another rank: bool [layers, slots]."""
        return self._reads_another & (self._source_rank != self._rank)

    def copies(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target slots of what a layer copies within ranks, in the order of targets."""
        targets = np.flatnonzero(self.is_copied[layer]).astype(np.int32)
        return self.source_of_slot[layer, targets], targets

    def sends(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target slots of what a layer sends between ranks, by source rank, then by target."""
        targets = np.flatnonzero(self.is_sent[layer]).astype(np.int32)
        sources = self.source_of_slot[layer, targets]
        order = np.argsort(sources // self._slots_per_rank, kind="stable")
        return sources[order], targets[order]

    def send_sizes(self, layer: int) -> np.ndarray:
        """Slots that each rank sends to each other one in a layer: int64 [source ranks, target ranks]."""
        sources, targets = self.sends(layer)
        sizes = np.zeros((self.ep_size, self.ep_size), np.int64)
        np.add.at(sizes, (sources // self._slots_per_rank, targets // self._slots_per_rank), 1)
        return sizes

    @property
    def _slots_per_rank(self) -> int:
        return self.source_of_slot.shape[1] // self.ep_size

    @property
    def _rank(self) -> np.ndarray:
        return np.arange(self.source_of_slot.shape[1]) // self._slots_per_rank

    @property
    def _source_rank(self) -> np.ndarray:
        return self.source_of_slot // self._slots_per_rank

    @property
    def _reads_another(self) -> np.ndarray:
        return self.source_of_slot != np.arange(self.source_of_slot.shape[1])


def transfer_plan(old: ExpertPlacement, new: ExpertPlacement, *, hosts: int) -> TransferPlan:
    """Choose a source for every slot: itself, then its own rank, then its own host, then anyone.

    The ranks lie over `hosts` in their order, equally many on each. Of several ranks that are equally near, the one
    that has the least to send in that layer does it. PlacementError where the placements are of different shapes.
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
    return TransferPlan(sources, old.ep_size)


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
