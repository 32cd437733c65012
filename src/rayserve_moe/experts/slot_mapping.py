"""From logical experts to slots: which of an expert's slots each token takes.

The maps are arrays of fixed shape that a step takes as arguments: new contents, same program. Without maps, expert i
lies in slot i.
"""

# T tokens   K experts per token   P expert slots of all ranks   E experts   R ranks   L layers   N assignments = T * K

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.balancing.placement import (
    NEAR_TOKENS,
    NEEDED_POINTS,
    OWN_POINTS,
    SLICE_POINTS,
    ExpertPlacement,
)
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.kernels.adapters import ExpertAdapters, RowAdapters
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.slot_order import order_by_slot

# A share of an expert's tokens is measured in parts of this; experts up to 2047 keep the sum in an int32.
WHOLE = 1 << 20
CHOSEN_BEFORE = "chosen_before"
GOLDEN = 2654435769  # 2**32 over the golden ratio: its multiples spread evenly over the 32-bit numbers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacementArrays:
    """The maps of all layers on the device, the same on every rank.

    `slots_LP` lists slots by expert. `bounds_LP` holds the begin of each slot's share of the tokens, as expert * WHOLE
    plus that fraction of WHOLE. `slot_for_LER` is the slot that a rank uses without shares.
    """

    bounds_LP: jax.Array | np.ndarray
    slots_LP: jax.Array | np.ndarray
    slot_for_LER: jax.Array | np.ndarray


class PlacedExperts(NamedTuple):
    """The experts of a MoE layer over all devices: this device's flat weights of all layers, the layer's number, and
    the maps of all layers (None: expert i in slot i)."""

    weights: ExpertWeights
    layer: jax.Array
    maps: PlacementArrays | None
    adapters: ExpertAdapters | None = None
    """This device's adapters, as the weights; None if no token has one."""

    def of_layer(self, product: ProductConfig, adapter_T: jax.Array | None = None) -> LayerExperts:
        """Return the layer's experts on this device; `adapter_T` are the adapters of the rows to multiply."""
        adapters = None if self.adapters is None or adapter_T is None else RowAdapters(self.adapters, adapter_T)
        return LayerExperts(self.weights, self.layer * product.num_slots, product, adapters)


def placement_arrays(placement: ExpertPlacement) -> PlacementArrays:
    """Turn a placement into maps, still in host memory.

    Their shapes follow from the numbers of layers, slots, experts and ranks, so a new placement fits the same program.
    """
    order_LP = np.argsort(placement.expert_of_slot, axis=1, kind="stable")
    experts_LP = np.take_along_axis(placement.expert_of_slot, order_LP, axis=1)
    shares_LP = np.take_along_axis(placement.share_of_slot, order_LP, axis=1).astype(np.float64)
    ends_LP = np.cumsum(shares_LP, axis=1)
    is_first_LP = np.diff(experts_LP, axis=1, prepend=-1) != 0
    starts_LP = ends_LP - shares_LP
    of_expert_LP = starts_LP - np.maximum.accumulate(np.where(is_first_LP, starts_LP, 0), axis=1)
    fractions_LP = np.clip(np.rint(of_expert_LP * WHOLE), 0, WHOLE - 1).astype(np.int32)
    arrays = experts_LP * WHOLE + fractions_LP, order_LP, placement.slot_for
    return PlacementArrays(*(np.ascontiguousarray(array, dtype=np.int32) for array in arrays))


def experts_of_slots(bounds: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the expert of each slot, int32 [..., P], given arrays of `PlacementArrays` in host memory."""
    experts = np.empty_like(slots)
    np.put_along_axis(experts, slots, bounds // WHOLE, axis=-1)
    return experts


def choose_slots(  # noqa: PLR0913 (keyword arguments that vary by call)
    ids_TK: jax.Array,
    valid_T: jax.Array,
    maps: PlacementArrays | None,
    *,
    layer: jax.Array,
    rank: jax.Array,
    config: ExpertConfig,
    near: bool = False,
) -> jax.Array:
    """Return the slot of every assignment, int32 [T, K], over all ranks' slots; `config.num_slots` for padding.

    `rank` dispatches a token: a number, or [T, 1]. If several ranks choose for the same tokens, give them the same
    `rank`. With `CHOSEN_BEFORE` the ids are slots, and -1 is none. With `near`, shares only decide between slots that
    are equally near to the token and to its other experts.

    Raises: ValueError for redundant slots without maps.
    """
    if config.slot_choice == CHOSEN_BEFORE:
        return jnp.where(valid_T[:, None] & (ids_TK >= 0), ids_TK, config.num_slots)
    if maps is None and config.num_redundant:
        raise ValueError(f"{config.num_redundant} redundant expert slots are of no use without a placement")
    slots_TK = ids_TK
    if maps is not None:
        assert maps.slots_LP.shape[1] == config.num_slots, f"maps of {maps.slots_LP.shape} for {config.num_slots} slots"
        arrays = jax.tree.map(jnp.asarray, maps)
        slots_TK = SLOT_CHOICES[config.slot_choice](ids_TK, valid_T, arrays, layer, rank)
        if near and config.slot_choice == "shares" and config.num_redundant:
            slots_TK = _nearest(ids_TK, slots_TK, arrays.slot_for_LER[layer], rank=rank, config=config)
    return jnp.where(valid_T[:, None], slots_TK, config.num_slots)


def _by_shares(
    ids_TK: jax.Array, valid_T: jax.Array, maps: PlacementArrays, layer: jax.Array, rank: jax.Array
) -> jax.Array:
    """Cut an expert's tokens, in their order, into the shares of its slots.

    Token i of n stands at (i + offset) / n, and the offsets of the ranks spread evenly over 0..1. So every rank is
    within a token of each share, and ranks with a single token use the slots in proportion.
    """
    slots_P = maps.slots_LP[layer]
    _, num_experts, num_ranks = maps.slot_for_LER.shape
    if slots_P.size == num_experts:
        return slots_P[ids_TK]
    index_TK, count_TK = place_within_expert(jnp.where(valid_T[:, None], ids_TK, num_experts), num_experts)
    fraction_TK = (index_TK + _offsets(ids_TK, rank, num_ranks)) / jnp.maximum(count_TK, 1)
    # A slot without a share begins at WHOLE - 1 at the latest, and no token stands there.
    key_TK = ids_TK * WHOLE + jnp.clip((fraction_TK * WHOLE).astype(jnp.int32), 0, WHOLE - 2)
    return slots_P[jnp.searchsorted(maps.bounds_LP[layer], key_TK, side="right", method="compare_all") - 1]


def is_near(num_tokens: int, *, config: ExpertConfig) -> bool:
    """Return True if steps with `num_tokens` of each data rank choose slots by distance.

    On one slice they do not: near slots save few rows of its fast links, and more slots are read from HBM.
    """
    return config.plan.num_slices > 1 and num_tokens * config.plan.data_size <= NEAR_TOKENS


def _nearest(
    ids_TK: jax.Array, shares_TK: jax.Array, slot_for_ER: jax.Array, *, rank: jax.Array, config: ExpertConfig
) -> jax.Array:
    """Return the slots that are nearest to each token and its other experts; `shares_TK` are the slots by shares.

    In this order: a slot of the token's own rank; of its slice; of a rank that the token needs for an expert without
    another replica; of the rank that holds most of the token's experts; the slot by shares; of the next rank.
    """
    num_ranks = slot_for_ER.shape[1]
    ranks_R = jnp.arange(num_ranks)
    slot_TKR = slot_for_ER[ids_TK]
    has_TKR = slot_TKR // (config.num_slots // num_ranks) == ranks_R
    rank_T1 = jnp.broadcast_to(jnp.asarray(rank).reshape(-1, 1), (len(ids_TK), 1))
    is_own_TR = ranks_R == rank_T1
    is_alone_TK = (jnp.sum(has_TKR, axis=2) == 1) & ~jnp.any(has_TKR & is_own_TR[:, None], axis=2)
    is_needed_TR = jnp.any(has_TKR & is_alone_TK[..., None], axis=1)
    per_slice = num_ranks // config.plan.num_slices
    is_near_TR = ranks_R // per_slice == rank_T1 // per_slice
    points_TR = OWN_POINTS * is_own_TR + SLICE_POINTS * is_near_TR + NEEDED_POINTS * is_needed_TR
    points_TR += 2 * jnp.sum(has_TKR, axis=1)
    points_TKR = (points_TR[:, None] + (slot_TKR == shares_TK[..., None])) * num_ranks
    distance_TR = (ranks_R - rank_T1) % num_ranks
    points_TKR = jnp.where(has_TKR, points_TKR + (num_ranks - 1 - distance_TR)[:, None], -1)
    best_TK1 = jnp.argmax(points_TKR, axis=2, keepdims=True)
    return jnp.take_along_axis(slot_TKR, best_TK1, axis=2)[..., 0]


def _by_rank(
    ids_TK: jax.Array, valid_T: jax.Array, maps: PlacementArrays, layer: jax.Array, rank: jax.Array
) -> jax.Array:
    """Return the slot that the placement names for this rank."""
    del valid_T
    return maps.slot_for_LER[layer][ids_TK, rank]


def _first(
    ids_TK: jax.Array, valid_T: jax.Array, maps: PlacementArrays, layer: jax.Array, rank: jax.Array
) -> jax.Array:
    """Return the first slot of each expert, ignoring its share."""
    del valid_T, rank
    place_TK = jnp.searchsorted(maps.bounds_LP[layer], ids_TK * WHOLE, side="left", method="compare_all")
    return maps.slots_LP[layer][place_TK]


SlotChoice = Callable[[jax.Array, jax.Array, PlacementArrays, jax.Array, jax.Array], jax.Array]

SLOT_CHOICES: dict[str, SlotChoice] = {"shares": _by_shares, "static": _by_rank, "first": _first}


def _offsets(ids_TK: jax.Array, rank: jax.Array, num_ranks: int) -> jax.Array:
    """Return a fraction in 0..1 per assignment: even steps over ranks from an expert's offset (Fibonacci hashing)."""
    step = np.uint32(((1 << 32) // num_ranks) % (1 << 32))
    turn_TK = jnp.asarray(rank).astype(jnp.uint32) * step + ids_TK.astype(jnp.uint32) * np.uint32(GOLDEN)
    return (turn_TK >> 8).astype(jnp.float32) / (1 << 24)


def place_within_expert(ids_TK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Return, per assignment, its rank among assignments to the same expert and their total, [T, K].

    `num_experts` stands for no expert.
    """
    ids_N = ids_TK.reshape(-1)
    counts_E = jnp.sum(ids_N[:, None] == jnp.arange(num_experts + 1), axis=0, dtype=jnp.int32)
    first_E = jnp.cumsum(counts_E) - counts_E
    place_N = order_by_slot(ids_TK, num_experts).place_P
    return (place_N - first_E[ids_N]).reshape(ids_TK.shape), counts_E[ids_N].reshape(ids_TK.shape)
