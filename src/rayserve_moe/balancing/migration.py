"""Migration of experts to another placement: the slots transferred with each step, and the placement meanwhile.

The moves are cut into pieces small enough to run beside a step, layer by layer. The last piece of a layer swaps its
weights and maps. A migration can be dropped after any piece: every layer then has its old or its new placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError


@dataclass(frozen=True, eq=False)
class SlotFetch:
    """Slots of a layer to fetch; both arrays are int32 [ranks, slots per piece]."""

    layer: int
    sources: np.ndarray
    """Source slot, numbered over all ranks; -1: none."""
    places: np.ndarray
    """Index of the target slot on its rank."""


@dataclass(frozen=True, eq=False)
class LayerSwap:
    """A layer's new placement."""

    layer: int
    placement: ExpertPlacement
    """Placement of the experts of this layer."""
    is_moved: np.ndarray
    """Slots that take fetched weights, bool [slots]."""


@dataclass(frozen=True, eq=False)
class MigrationPiece:
    """Work of every host before a step: a fetch, a swap, or a fetch followed by the swap of its layer."""

    version: int
    """Number of placements that were started."""
    fetch: SlotFetch | None = None
    swap: LayerSwap | None = None


class FailedFetch(NamedTuple):
    """The failure of a migration. Nothing of the version has run from this layer's fetch on."""

    version: int
    layer: int


@dataclass(frozen=True)
class MigrationProgress:
    """Progress of a migration."""

    version: int
    """Version of the resulting placement."""
    num_layers: int = 0
    """Layers that change."""
    num_layers_done: int = 0
    num_slots: int = 0
    """Slots that are transferred."""
    num_slots_done: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_layers_done == self.num_layers

    def as_json(self) -> dict[str, int | bool]:
        """Return the numbers under the names of the HTTP API."""
        return {
            "version": self.version,
            "layers": self.num_layers,
            "layers_done": self.num_layers_done,
            "slots": self.num_slots,
            "slots_done": self.num_slots_done,
            "is_done": self.is_done,
        }


class Migration:
    """Generates the pieces that lead from the current placement to another. Ranks are divided over `hosts` and
    `slices`.

    With each piece a rank receives at most `slots_per_step` slots, and sends at most as many.
    """

    def __init__(self, placement: ExpertPlacement, *, hosts: int, slots_per_step: int, slices: int = 1) -> None:
        self._hosts, self.num_slices, self._slots_per_step = hosts, slices, slots_per_step
        self._pieces: Iterator[MigrationPiece] = iter(())
        # Old placement, new placement, swapped layers: a single value, for readers from other threads.
        self._way = (placement, placement, np.ones(placement.num_layers, np.bool_))
        self.progress = MigrationProgress(0)
        self.given_up_version = 0

    @property
    def placement(self) -> ExpertPlacement:
        """Return the placement, with shares, once all pieces returned so far have run."""
        old, new, swapped = self._way
        if swapped.all():
            return new
        return ExpertPlacement(
            np.where(swapped[:, None], new.expert_of_slot, old.expert_of_slot),
            np.where(swapped[:, None], new.share_of_slot, old.share_of_slot),
            np.where(swapped[:, None, None], new.slot_for, old.slot_for),
        )

    @property
    def target(self) -> ExpertPlacement:
        """Return the placement of the last started migration."""
        return self._way[1]

    def check(self, placement: ExpertPlacement) -> None:
        """Raise PlacementError if `placement` has other layers, slots or ranks."""
        check_alike(self._way[0], placement)

    def begin(self, placement: ExpertPlacement) -> int:
        """Start the migration to `placement`, replacing the current migration; return its version.

        Raises PlacementError, without any change, if it has other layers, slots or ranks.
        """
        self.check(placement)
        old = self.placement
        is_moved, is_changed = _changes(old, placement)
        layers = np.flatnonzero(is_changed)
        is_swapped = np.ones(old.num_layers, np.bool_)
        is_swapped[layers] = False
        self._way = (old, placement, is_swapped)
        version = self.progress.version + 1
        self.progress = MigrationProgress(version, len(layers), num_slots=int(is_moved.sum()))
        self._pieces = self._all_pieces(layers, version)
        return version

    def reset(self, placement: ExpertPlacement, *, hosts: int, slices: int) -> None:
        """Reset to `placement` without a migration, after a restart of hosts, possibly with another number."""
        self._hosts, self.num_slices = hosts, slices
        self._pieces = iter(())
        self._way = (placement, placement, np.ones(placement.num_layers, np.bool_))
        self.progress = MigrationProgress(self.progress.version)

    def next_piece(self) -> MigrationPiece | None:
        """Return the piece to run with the next step, or None if nothing is left."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._account(piece)
        return piece

    def give_up(self, failure: FailedFetch) -> None:
        """Cancel the migration from the failed fetch on. Layers that were swapped before stay swapped.

        A version is cancelled only once.
        """
        version, layer = failure
        assert version > self.given_up_version, "the version was given up already"
        assert version == self.progress.version, "pieces of two migrations are running"
        old, new, swapped = self._way
        before = np.arange(old.num_layers) < layer
        self._way = (old, new, swapped & before)
        stays = self.placement
        is_moved, is_changed = _changes(old, stays)
        num_layers, num_slots = int(is_changed.sum()), int(is_moved.sum())
        self.given_up_version, self._pieces = version, iter(())
        self._way = (stays, stays, np.ones_like(swapped))
        self.progress = MigrationProgress(version, num_layers, num_layers, num_slots, num_slots)

    def _all_pieces(self, layers: np.ndarray, version: int) -> Iterator[MigrationPiece]:
        """Yield the pieces of all layers. Each layer is planned just before its first piece, to spread host time over
        steps.
        """
        all_old, all_new, _ = self._way
        num_ranks, max_slots = all_new.ep_size, self._slots_per_step
        for layer in layers.tolist():
            old, new = _layer_of(all_old, layer), _layer_of(all_new, layer)
            sources = transfer_sources(old, new, hosts=self._hosts, slices=self.num_slices)[0]
            fetches = [*fetches_of(sources, layer=layer, num_ranks=num_ranks, max_slots=max_slots)] or [None]
            for fetch in fetches[:-1]:
                yield MigrationPiece(version, fetch)
            yield MigrationPiece(version, fetches[-1], LayerSwap(layer, new, sources != np.arange(len(sources))))

    def _account(self, piece: MigrationPiece) -> None:
        before = self.progress
        if piece.swap is not None:
            self._way[2][piece.swap.layer] = True
        num_fetched = 0 if piece.fetch is None else int((piece.fetch.sources >= 0).sum())
        self.progress = replace(
            before,
            num_layers_done=before.num_layers_done + (piece.swap is not None),
            num_slots_done=before.num_slots_done + num_fetched,
        )


def fetches_of(source_of_slot: np.ndarray, *, layer: int, num_ranks: int, max_slots: int) -> Iterator[SlotFetch]:
    """Cut a layer's moves into fetches in which no rank receives or sends more than `max_slots` slots.

    `source_of_slot` [slots] is a layer of `transfer_sources`. Each fetch has the maximum number of slots.
    """
    slots_per_rank = len(source_of_slot) // num_ranks
    waiting = np.flatnonzero(source_of_slot != np.arange(len(source_of_slot))).tolist()
    while waiting:
        sources, places = np.full((num_ranks, max_slots), -1, np.int32), np.zeros((num_ranks, max_slots), np.int32)
        num_received, num_sent, left = [0] * num_ranks, [0] * num_ranks, []
        for slot in waiting:
            source, (rank, place) = int(source_of_slot[slot]), divmod(slot, slots_per_rank)
            sender = source // slots_per_rank
            if num_received[rank] == max_slots or num_sent[sender] == max_slots:
                left.append(slot)
                continue
            sources[rank, num_received[rank]], places[rank, num_received[rank]] = source, place
            num_received[rank] += 1
            num_sent[sender] += 1
        waiting = left
        yield SlotFetch(layer, sources, places)


def _changes(old: ExpertPlacement, new: ExpertPlacement) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that get another expert, bool [layers, slots], and the layers with any change, bool [layers]."""
    is_moved = old.expert_of_slot != new.expert_of_slot
    shares = (old.share_of_slot != new.share_of_slot).any(axis=1)
    return is_moved, is_moved.any(axis=1) | shares | (old.slot_for != new.slot_for).any(axis=(1, 2))


def _layer_of(placement: ExpertPlacement, layer: int) -> ExpertPlacement:
    rows = slice(layer, layer + 1)
    return ExpertPlacement(placement.expert_of_slot[rows], placement.share_of_slot[rows], placement.slot_for[rows])


def transfer_sources(old: ExpertPlacement, new: ExpertPlacement, *, hosts: int, slices: int = 1) -> np.ndarray:
    """Return for every slot the slot that holds its next expert now: int32 [layers, slots].

    The source is the slot itself, or else a slot of its rank, its host, its slice, or another slice. The ranks are
    divided over `hosts` and `slices` in order, equally many on each. All moves of a layer are simultaneous, so a slot
    may be read and overwritten at once. Among equally near ranks, the rank with the minimum number of slots to send in
    the layer is the source. Raises PlacementError if the placements have different shapes.
    """
    check_alike(old, new)
    if hosts < 1 or old.ep_size % hosts:
        raise PlacementError(f"{old.ep_size} ranks do not spread evenly over {hosts} hosts")
    if slices < 1 or old.ep_size % slices:
        raise PlacementError(f"{old.ep_size} ranks do not spread evenly over {slices} slices")
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
            slots_per_slice=old.num_slots // slices,
        )
    return sources


def check_alike(old: ExpertPlacement, new: ExpertPlacement) -> None:
    """Raise PlacementError if two placements have different layers, slots or ranks."""
    if old.expert_of_slot.shape != new.expert_of_slot.shape or old.slot_for.shape != new.slot_for.shape:
        shapes = [
            f"{each.num_layers} layers of {each.num_experts} experts in {each.num_slots} slots on {each.ep_size} ranks"
            for each in (old, new)
        ]
        raise PlacementError(f"the placements have different layers, slots or ranks: {shapes[0]}, and {shapes[1]}")


def _own_rank_sources(old: ExpertPlacement, new: ExpertPlacement) -> np.ndarray:
    """Return the slot of the same rank that holds a slot's next expert, or -1: int32 [layers, slots]."""
    layers = np.arange(old.num_layers)[:, None]
    slots = np.arange(old.num_slots, dtype=np.int32)
    ranks = slots // old.slots_per_rank
    place = np.full((old.num_layers, old.ep_size, old.num_experts), -1, np.int32)
    place[layers, ranks, old.expert_of_slot] = slots
    return place[layers, ranks, new.expert_of_slot]


def _choose_senders(
    sources: np.ndarray,
    old: np.ndarray,
    new: np.ndarray,
    *,
    slots_per_rank: int,
    slots_per_host: int,
    slots_per_slice: int,
) -> None:
    """Fill in the sources of a layer that are still -1."""
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.tolist()):
        holders.setdefault(expert, []).append(slot)
    num_sent = [0] * (len(old) // slots_per_rank)
    for target in np.flatnonzero(sources < 0).tolist():
        host, of_slice = target // slots_per_host, target // slots_per_slice

        def distance(slot: int, host: int = host, of_slice: int = of_slice) -> tuple[bool, bool, int, int]:
            others = slot // slots_per_host != host, slot // slots_per_slice != of_slice
            return (*others, num_sent[slot // slots_per_rank], slot)

        source = min(holders[int(new[target])], key=distance)
        num_sent[source // slots_per_rank] += 1
        sources[target] = source
