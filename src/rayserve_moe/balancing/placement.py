"""Placements of experts: the expert of each slot, and each slot's share of its expert's tokens.

A placement is a plain value for all MoE layers; planning and the transfer of weights are elsewhere. Slots are numbered
over the whole group, `slots_per_rank` neighbours per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_REDUNDANT = 128
SHARE_TOLERANCE = 1e-4
NEAR_TOKENS = 128
"""Maximum tokens of a step, over all ranks, whose slots are chosen by distance; above it loads alone decide."""
ONCE_ASSIGNMENTS = 1 << 15
"""Maximum assignments of a step on several slices, over all ranks, with which a token's row goes once to each rank of
its slots. All ranks gather and sort them, which rows within a single slice are not worth."""
OWN_POINTS, SLICE_POINTS, NEEDED_POINTS = 8192, 4096, 64
"""Points of a slot on the token's own rank, on its slice, and on a rank that it needs for an expert without replicas.

Each exceeds all smaller ones together, and the number of a token's experts on a rank."""


class PlacementError(ValueError):
    """Numbers that are not a valid placement of experts over slots."""


class PlacementConflictError(PlacementError):
    """Experts are still moving to another requested placement."""


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Contents of the expert slots of every layer, checked when built; the arrays are read-only views.

    Every expert has a slot, and no rank holds an expert twice unless it has more slots than experts exist. Raises
    PlacementError with the violated condition.
    """

    expert_of_slot: np.ndarray
    """int32 [layers, slots]."""
    share_of_slot: np.ndarray
    """float32 [layers, slots]; the slots of an expert add up to 1."""
    slot_for: np.ndarray
    """int32 [layers, experts, ranks]: the slot that a rank uses if it may use only a single replica."""

    def __post_init__(self) -> None:
        for name, dtype, dims in (("expert_of_slot", "i4", 2), ("share_of_slot", "f4", 2), ("slot_for", "i4", 3)):
            array = getattr(self, name).view()
            if array.dtype != np.dtype(dtype) or array.ndim != dims:
                raise PlacementError(f"{name} is {array.dtype} of {array.ndim} dimensions, not {dtype} of {dims}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        _check_shapes(self)
        _check_experts(self)
        _check_shares(self)
        _check_static_slots(self)

    @property
    def num_layers(self) -> int:
        return self.expert_of_slot.shape[0]

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot.shape[1]

    @property
    def num_experts(self) -> int:
        return self.slot_for.shape[1]

    @property
    def ep_size(self) -> int:
        """Return the number of ranks that the slots are divided over."""
        return self.slot_for.shape[2]

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.ep_size

    @property
    def num_redundant(self) -> int:
        """Return the number of slots beyond one per expert."""
        return self.num_slots - self.num_experts


def identity_placement(num_layers: int, num_experts: int, *, ep_size: int, num_redundant: int = 0) -> ExpertPlacement:
    """Lay the experts out in their own order, repeated until all slots are filled; equal shares.

    With `num_redundant` 0 slot i holds expert i. Replicas are spread evenly: a rank's neighbouring slots hold different
    experts unless it has more slots than experts exist. Raises PlacementError if ranks do not divide the slots.
    """
    num_slots = num_experts + num_redundant
    experts = np.arange(num_slots, dtype=np.int32) % num_experts
    expert_of_slot = np.broadcast_to(experts, (num_layers, num_slots))
    return placement_from(expert_of_slot, None, num_experts=num_experts, ep_size=ep_size)


def placement_from(
    expert_of_slot: np.ndarray, share_of_slot: np.ndarray | None, *, num_experts: int, ep_size: int
) -> ExpertPlacement:
    """Complete a placement from `expert_of_slot` [layers, slots]; without shares an expert's slots take equal parts.

    The static slot of a rank is its own replica if it has one; otherwise neighbouring ranks use the same replica, each
    replica about equally many ranks. The arguments are not modified. Raises PlacementError with the violated condition.
    """
    expert_of_slot = np.asarray(expert_of_slot)
    if expert_of_slot.ndim != 2 or ep_size < 1 or expert_of_slot.shape[1] % ep_size:
        raise PlacementError(f"slots of shape {expert_of_slot.shape} do not spread evenly over {ep_size} ranks")
    replicas = _replicas(expert_of_slot, num_experts)
    expert_of_slot = np.ascontiguousarray(expert_of_slot, dtype=np.int32)
    if share_of_slot is None:
        share_of_slot = 1 / np.take_along_axis(replicas, expert_of_slot, axis=1)
    with np.errstate(over="ignore"):  # a share beyond float32 becomes infinite, which the check refuses
        share_of_slot = np.ascontiguousarray(share_of_slot, dtype=np.float32)
    return ExpertPlacement(expert_of_slot, share_of_slot, _static_slots(expert_of_slot, replicas, ep_size))


def lowered_redundancy(num_experts: int, *, ep_size: int, wanted: int) -> int:
    """Return the maximum number of redundant slots up to `wanted` with which `ep_size` ranks divide all slots.

    Raises PlacementError if `wanted` is not in 0..128, or if not even 0 fits; it then names the minimum that fits.
    """
    if not 0 <= wanted <= MAX_REDUNDANT:
        raise PlacementError(f"{wanted} redundant experts are not in 0..{MAX_REDUNDANT}")
    lowered = wanted - (num_experts + wanted) % ep_size
    if lowered < 0:
        raise PlacementError(
            f"{num_experts} experts do not spread over {ep_size} devices with {wanted} redundant experts; the smallest "
            f"number of redundant experts that fits is {-num_experts % ep_size}"
        )
    return lowered


def _replicas(expert_of_slot: np.ndarray, num_experts: int) -> np.ndarray:
    """Count the slots of each expert: [layers, experts]."""
    if expert_of_slot.size and not (expert_of_slot.min() >= 0 and expert_of_slot.max() < num_experts):
        raise PlacementError(f"a slot holds an expert outside of 0..{num_experts - 1}")
    num_layers = len(expert_of_slot)
    keys = expert_of_slot + num_experts * np.arange(num_layers)[:, None]
    counts = np.bincount(keys.reshape(-1), minlength=num_layers * num_experts).reshape(num_layers, num_experts)
    if not counts.all():
        layer, expert = np.argwhere(counts == 0)[0]
        raise PlacementError(f"expert {expert} of layer {layer} has no slot")
    return counts


def _static_slots(expert_of_slot: np.ndarray, replicas: np.ndarray, ep_size: int) -> np.ndarray:
    num_layers, num_slots = expert_of_slot.shape
    slots_by_expert = np.argsort(expert_of_slot, axis=1, kind="stable").astype(np.int32)
    first = (np.cumsum(replicas, axis=1) - replicas).astype(np.int32)
    replica_of_rank = (np.arange(replicas.max() + 1)[:, None] * np.arange(ep_size) // ep_size).astype(np.int32)
    slots = np.arange(num_slots, dtype=np.int32)
    own_ranks = slots // (num_slots // ep_size)
    slot_for = np.empty((*replicas.shape, ep_size), np.int32)
    # Plain look-ups layer by layer are several times faster than a single look-up with three indices.
    for layer in range(num_layers):
        places = first[layer, :, None] + replica_of_rank[replicas[layer]]
        np.take(slots_by_expert[layer], places, out=slot_for[layer], mode="clip")
        slot_for[layer, expert_of_slot[layer], own_ranks] = slots
    return slot_for


def _check_shapes(placement: ExpertPlacement) -> None:
    num_layers, num_slots = placement.expert_of_slot.shape
    if placement.share_of_slot.shape != (num_layers, num_slots) or len(placement.slot_for) != num_layers:
        raise PlacementError("expert_of_slot, share_of_slot and slot_for have different layers or slots")
    if placement.ep_size < 1 or num_slots % placement.ep_size:
        raise PlacementError(f"{num_slots} slots do not spread evenly over {placement.ep_size} ranks")
    if placement.slot_for.size and not (placement.slot_for.min() >= 0 and placement.slot_for.max() < num_slots):
        raise PlacementError(f"slot_for names a slot outside of 0..{num_slots - 1}")


def _check_experts(placement: ExpertPlacement) -> None:
    _replicas(placement.expert_of_slot, placement.num_experts)
    if placement.slots_per_rank > placement.num_experts:
        return
    by_rank = placement.expert_of_slot.reshape(placement.num_layers, placement.ep_size, placement.slots_per_rank)
    ordered = np.sort(by_rank, axis=-1)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice):
        layer, rank, place = twice[0]
        raise PlacementError(f"rank {rank} of layer {layer} holds expert {ordered[layer, rank, place]} twice")


def _check_shares(placement: ExpertPlacement) -> None:
    shares, num_layers, num_experts = placement.share_of_slot, placement.num_layers, placement.num_experts
    if not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise PlacementError("a share is negative or not a number")
    keys = placement.expert_of_slot + num_experts * np.arange(num_layers)[:, None]
    totals = np.bincount(keys.reshape(-1), weights=shares.reshape(-1), minlength=num_layers * num_experts)
    wrong = np.flatnonzero(abs(totals - 1) > SHARE_TOLERANCE)
    if len(wrong):
        layer, expert = divmod(int(wrong[0]), num_experts)
        raise PlacementError(f"the shares of expert {expert} of layer {layer} add up to {totals[wrong[0]]:.6g}, not 1")


def _check_static_slots(placement: ExpertPlacement) -> None:
    experts = np.arange(placement.num_experts, dtype=np.int32)[:, None]
    for layer, slots in enumerate(placement.slot_for):
        if (placement.expert_of_slot[layer].take(slots) != experts).any():
            raise PlacementError(f"slot_for names a slot of layer {layer} that holds another expert")
