"""Costs of tokens under a placement: the ranks that compute them, rows between ranks, and the hottest rank.

It works on rows: the experts that routers chose for tokens, of a rollout or of a server's last steps. Slots are chosen
as `experts.slot_mapping` chooses them on devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement

WHOLE = 1 << 20  # a share of an expert's tokens is measured in parts of this
GOLDEN = 2654435769  # 2**32 over the golden ratio: its multiples spread evenly over the 32-bit numbers
NEAR_TOKENS = 128
"""Maximum tokens of a step, over all ranks, whose slots are chosen by distance; above it loads decide."""
OTHER_RANK_POINTS, SLICE_POINTS = 64, 4096


@dataclass(frozen=True)
class CostRates:
    """Seconds of a layer's work on a device and its links; the defaults are of Qwen3-30B-A3B in bfloat16 on v6e."""

    slot_s: float = 9.4e6 / 1638e9
    """Seconds to read an expert's weights, once per slot that has a token."""
    row_s: float = 9.4e6 / 918e12
    """Seconds to multiply a row by an expert."""
    ici_s: float = 4096 / 180e9
    """Seconds to send a row to another rank of the slice."""
    dcn_s: float = 4096 / 6.25e9
    """Seconds to send a row to another slice."""


class Traffic(NamedTuple):
    """Means over batches, per layer: float64 [layers] each."""

    distinct_ranks: np.ndarray
    """Ranks that compute a token."""
    remote_ranks: np.ndarray
    """Ranks other than the token's own that compute it."""
    remote_rows: np.ndarray
    """Rows of a token that leave its rank, one for each expert elsewhere."""
    far_rows: np.ndarray
    """Rows of a token that leave its slice."""
    hottest_rows: np.ndarray
    """Rows of a batch on its hottest rank."""
    used_slots: np.ndarray
    """Slots with a token on the rank with the most such slots."""
    loads: np.ndarray
    """Rows of all batches by rank, [layers, ranks]."""

    def seconds(self, rates: CostRates, *, batch: int, num_ranks: int) -> np.ndarray:
        """Return the seconds of a batch of `batch` tokens by layer: the hottest rank's work, then rows out and back."""
        near_rows = self.remote_rows - self.far_rows
        links = (near_rows * rates.ici_s + self.far_rows * rates.dcn_s) * 2 * batch / num_ranks
        return self.used_slots * rates.slot_s + self.hottest_rows * rates.row_s + links


def traffic_of(
    placement: ExpertPlacement,
    rows: np.ndarray,
    *,
    batch: int,
    num_slices: int = 1,
    near: bool | None = None,
    sources: np.ndarray | None = None,
) -> Traffic:
    """Return the traffic of `rows` [tokens, layers, k], taken in batches of `batch` tokens in order.

    The tokens of a batch are divided over the ranks in turn, or by `sources` [tokens]. `near` selects the slots by
    distance; None: if the batch has at most `NEAR_TOKENS`. Tokens beyond the last whole batch are left out unless they
    are all.
    """
    num_ranks, is_near = placement.ep_size, batch <= NEAR_TOKENS if near is None else near
    num_tokens = len(rows) // batch * batch or len(rows)
    rank_T = np.arange(num_tokens) % batch % num_ranks if sources is None else sources[:num_tokens]
    batch_T = np.arange(num_tokens) // batch
    num_batches = int(batch_T[-1]) + 1 if num_tokens else 1
    per_slice = num_ranks // num_slices
    found = []
    for layer in range(placement.num_layers):
        maps = LayerMaps.of(placement, layer)
        ids_TK = np.asarray(rows[:num_tokens, layer], np.int64)
        by_shares = slots_by_shares(maps, ids_TK, ranks=rank_T, groups=batch_T * num_ranks + rank_T)
        slots_TK = (
            nearest_slots(maps, ids_TK, ranks=rank_T, by_shares=by_shares, num_slices=num_slices)
            if is_near
            else by_shares
        )
        ranks_TK = slots_TK // placement.slots_per_rank
        is_used_TR = np.zeros((num_tokens, num_ranks), np.bool_)
        np.put_along_axis(is_used_TR, ranks_TK, values=True, axis=1)
        distinct = np.count_nonzero(is_used_TR)
        own = np.count_nonzero(is_used_TR[np.arange(num_tokens), rank_T])
        loads_BR = np.bincount(
            (batch_T[:, None] * num_ranks + ranks_TK).reshape(-1), minlength=num_batches * num_ranks
        ).reshape(num_batches, num_ranks)
        is_used_BP = np.zeros((num_batches, placement.num_slots), np.bool_)
        is_used_BP[batch_T[:, None], slots_TK] = True
        used_BR = is_used_BP.reshape(num_batches, num_ranks, -1).sum(axis=2)
        numbers = (
            distinct,
            distinct - own,
            np.count_nonzero(ranks_TK != rank_T[:, None]),
            np.count_nonzero(ranks_TK // per_slice != rank_T[:, None] // per_slice),
        )
        per_token = [number / max(1, num_tokens) for number in numbers]
        found.append((*per_token, loads_BR.max(axis=1).mean(), used_BR.max(axis=1).mean(), loads_BR.sum(axis=0)))
    return Traffic(*(np.array(column, np.float64) for column in zip(*found, strict=True)))


class LayerMaps(NamedTuple):
    """The maps of a layer for choosing slots."""

    bounds_P: np.ndarray
    """Begin of each slot's share, as expert * WHOLE plus that part of WHOLE, in the order of `slots_P`."""
    slots_P: np.ndarray
    """Slots by expert."""
    slot_on_ER: np.ndarray
    """Slot of an expert on a rank; -1: none."""

    @classmethod
    def of(cls, placement: ExpertPlacement, layer: int) -> LayerMaps:
        """Return the maps of a layer of a placement."""
        experts_P, shares_P = placement.expert_of_slot[layer], placement.share_of_slot[layer].astype(np.float64)
        slots_P = np.argsort(experts_P, kind="stable")
        experts_P, shares_P = experts_P[slots_P].astype(np.int64), shares_P[slots_P]
        starts_P = np.cumsum(shares_P) - shares_P
        is_first_P = np.diff(experts_P, prepend=-1) != 0
        starts_P -= np.maximum.accumulate(np.where(is_first_P, starts_P, 0))
        bounds_P = experts_P * WHOLE + np.clip(np.rint(starts_P * WHOLE), 0, WHOLE - 1).astype(np.int64)
        slot_for_ER = placement.slot_for[layer].astype(np.int64)
        is_there_ER = slot_for_ER // placement.slots_per_rank == np.arange(placement.ep_size)
        return cls(bounds_P, slots_P, np.where(is_there_ER, slot_for_ER, -1))


def slots_by_shares(maps: LayerMaps, ids_TK: np.ndarray, *, ranks: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the slot of every assignment [T, K] by shares.

    `ranks` [T] dispatch the tokens; tokens of the same of `groups` [T] are dispatched together.
    """
    num_experts, num_ranks = maps.slot_on_ER.shape
    keys = (groups[:, None] * num_experts + ids_TK).reshape(-1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(begins, append=len(ordered))
    place, count = np.empty_like(keys), np.empty_like(keys)
    place[order] = np.arange(len(ordered)) - np.repeat(begins, counts)
    count[order] = np.repeat(counts, counts)
    step = ((1 << 32) // num_ranks) % (1 << 32)
    turn = (ranks[:, None].astype(np.uint64) * step + ids_TK.astype(np.uint64) * GOLDEN) % (1 << 32)
    offsets = (turn >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24)
    fractions = (place.reshape(ids_TK.shape).astype(np.float32) + offsets) / count.reshape(ids_TK.shape).astype("f4")
    within = np.clip((fractions * np.float32(WHOLE)).astype(np.int64), 0, WHOLE - 2)
    return maps.slots_P[np.searchsorted(maps.bounds_P, ids_TK * WHOLE + within, side="right") - 1]


def nearest_slots(
    maps: LayerMaps, ids_TK: np.ndarray, *, ranks: np.ndarray, by_shares: np.ndarray, num_slices: int = 1
) -> np.ndarray:
    """Return the slot of every assignment [T, K] that is nearest to its token and to the token's other experts.

    In this order: a slot of the token's own rank; of its slice; of a rank that the token needs for an expert without
    another replica; of the rank that holds most of the token's experts; the slot `by_shares` [T, K]; of the next rank.
    """
    num_ranks = maps.slot_on_ER.shape[1]
    slot_TKR = maps.slot_on_ER[ids_TK]
    has_TKR = slot_TKR >= 0
    all_ranks, (num_tokens, top_k) = np.arange(num_ranks), ids_TK.shape
    is_own_TR = all_ranks == ranks[:, None]
    is_alone_TK = (has_TKR.sum(axis=2) == 1) & ~(has_TKR & is_own_TR[:, None]).any(axis=2)
    is_needed_TR = (has_TKR & is_alone_TK[..., None]).any(axis=1)
    per_slice = num_ranks // num_slices
    is_near_TR = all_ranks // per_slice == (ranks // per_slice)[:, None]
    points_TR = 2 * SLICE_POINTS * is_own_TR + SLICE_POINTS * is_near_TR + OTHER_RANK_POINTS * is_needed_TR
    points_TR += 2 * has_TKR.sum(axis=1)
    is_share_TKR = slot_TKR == by_shares[..., None]
    points_TKR = np.where(has_TKR, (points_TR[:, None] + is_share_TKR) * num_ranks, -1)
    # Among equal ranks the next one after the token's own, so that tokens of different ranks spread.
    points_TKR = points_TKR + np.where(has_TKR, num_ranks - 1 - (all_ranks - ranks[:, None, None]) % num_ranks, 0)
    chosen_TK = points_TKR.argmax(axis=2)
    return np.take_along_axis(slot_TKR, chosen_TK[..., None], axis=2).reshape(num_tokens, top_k)
