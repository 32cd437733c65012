"""Costs of tokens under a placement: the ranks that compute them, rows between ranks, and the hottest rank.

It works on rows: the experts that routers chose for tokens, of a rollout or of a server's last steps. Slots are chosen
as `experts.slot_mapping` chooses them on devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.balancing.placement import (
    NEAR_TOKENS,
    NEEDED_POINTS,
    ONCE_ASSIGNMENTS,
    OWN_POINTS,
    SLICE_POINTS,
    ExpertPlacement,
)

WHOLE = 1 << 20  # a share of an expert's tokens is measured in parts of this
BLOCK = 1 << 14  # tokens of all layers that are counted at once
GOLDEN = 2654435769  # 2**32 over the golden ratio: its multiples spread evenly over the 32-bit numbers


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
    """Results of a token from other ranks, one for each expert elsewhere."""
    far_rows: np.ndarray
    """Results of a token from other slices."""
    rows_out: np.ndarray
    """Rows of a token that leave its rank: one for each remote rank in small steps on several slices, else one for each
    result."""
    far_rows_out: np.ndarray
    """Rows of a token that leave its slice, likewise."""
    hottest_rows: np.ndarray
    """Rows of a batch on its hottest rank."""
    used_slots: np.ndarray
    """Slots with a token on the rank with the most such slots."""
    loads: np.ndarray
    """Rows of all batches by rank, [layers, ranks]."""

    def seconds(self, rates: CostRates, *, batch: int, num_ranks: int) -> np.ndarray:
        """Return the seconds of a batch of `batch` tokens by layer: the hottest rank's work, then rows out and back."""
        far_rows = self.far_rows + self.far_rows_out
        near_rows = self.remote_rows + self.rows_out - far_rows
        links = (near_rows * rates.ici_s + far_rows * rates.dcn_s) * batch / num_ranks
        return self.used_slots * rates.slot_s + self.hottest_rows * rates.row_s + links


@dataclass(frozen=True)
class Batches:
    """Tokens in batches, divided over the ranks in turn; tokens beyond the last whole batch count only if alone."""

    num_rows: int
    """Tokens that there are."""
    size: int
    """Tokens of a batch."""
    num_ranks: int
    num_slices: int = 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that count."""
        return self.num_rows // self.size * self.size or self.num_rows

    @property
    def of_tokens(self) -> np.ndarray:
        """Return the number of each token's batch."""
        return np.arange(self.num_tokens) // self.size

    @property
    def ranks(self) -> np.ndarray:
        """Return the rank that dispatches each token."""
        return np.arange(self.num_tokens) % self.size % self.num_ranks

    def send_once(self, top_k: int) -> bool:
        """Return True if a token's row goes once to each rank of its slots, as in `experts.rank_rows`."""
        return self.num_slices > 1 and self.size * top_k <= ONCE_ASSIGNMENTS


def traffic_of(
    placement: ExpertPlacement,
    rows: np.ndarray,
    *,
    batch: int,
    num_slices: int = 1,
    near: bool | None = None,
    keys: Sequence[np.ndarray] | None = None,
) -> Traffic:
    """Return the traffic of `rows` [tokens, layers, k] in `Batches`.

    `near` selects slots by distance; None: as devices do, on several slices if the batch has at most `NEAR_TOKENS`.
    `keys` are the `keys_of` these batches; None: they are computed.
    """
    is_near = (num_slices > 1 and batch <= NEAR_TOKENS) if near is None else near
    batches = Batches(len(rows), batch, placement.ep_size, num_slices)
    sources = batches.ranks
    by_layer = keys_of(rows, batches, num_experts=placement.num_experts) if keys is None else keys

    maps = LayerMaps.of(placement)

    def slots_of(layer: int, ids: np.ndarray) -> np.ndarray:
        by_shares = maps[layer].slots_at(by_layer[layer])
        if not is_near:
            return by_shares
        return nearest_slots(maps[layer], ids, ranks=sources, by_shares=by_shares, num_slices=num_slices)

    return count_traffic(slots_of, rows, batches=batches, slots_per_rank=placement.slots_per_rank)


def count_traffic(
    slots_of: Callable[[int, np.ndarray], np.ndarray], rows: np.ndarray, *, batches: Batches, slots_per_rank: int
) -> Traffic:
    """Count the traffic of `rows` [tokens, layers, k] if `slots_of(layer, ids)` are the slots that tokens take."""
    num_tokens, num_layers, per_block = batches.num_tokens, rows.shape[1], max(1, BLOCK // max(1, batches.num_tokens))
    blocks = [range(num_layers)[first : first + per_block] for first in range(0, num_layers, per_block)]
    found = []
    for block in blocks:
        slots = np.stack([slots_of(layer, np.asarray(rows[:num_tokens, layer], np.int64)) for layer in block])
        found.append(_count_block(slots, batches, slots_per_rank=slots_per_rank))
    return Traffic(*(np.concatenate(column).astype(np.float64) for column in zip(*found, strict=True)))


def _count_block(slots: np.ndarray, batches: Batches, *, slots_per_rank: int) -> tuple[np.ndarray, ...]:
    """Return the fields of the traffic of some layers, from `slots` [layers, tokens, k]."""
    num_layers, num_tokens, top_k = slots.shape
    num_ranks, sources, batch = batches.num_ranks, batches.ranks, batches.of_tokens
    num_batches, per_slice = -(-num_tokens // batches.size), num_ranks // batches.num_slices
    ranks = slots // slots_per_rank
    is_used = np.zeros((num_layers * num_tokens, num_ranks), np.bool_)
    is_used[np.arange(len(is_used))[:, None], ranks.reshape(len(is_used), -1)] = True
    is_used = is_used.reshape(num_layers, num_tokens, num_ranks)
    own_slice = sources[:, None] // per_slice
    is_far = np.arange(num_ranks) // per_slice != own_slice
    distinct, far_ranks = is_used.sum(axis=(1, 2)), (is_used & is_far).sum(axis=(1, 2))
    remote_ranks = distinct - is_used[:, np.arange(num_tokens), sources].sum(axis=1)
    results = [(ranks != sources[:, None]).sum(axis=(1, 2)), (ranks // per_slice != own_slice).sum(axis=(1, 2))]
    out = [remote_ranks, far_ranks] if batches.send_once(top_k) else results
    per_token = [number / max(1, num_tokens) for number in (distinct, remote_ranks, *results, *out)]
    groups = np.arange(num_layers)[:, None, None] * num_batches + batch[:, None]
    keys = (groups * num_ranks + ranks).reshape(-1)
    loads = np.bincount(keys, minlength=num_layers * num_batches * num_ranks)
    loads = loads.reshape(num_layers, num_batches, num_ranks)
    is_used = np.zeros((num_layers * num_batches, num_ranks * slots_per_rank), np.bool_)
    is_used[groups, slots] = True
    used = is_used.reshape(num_layers, num_batches, num_ranks, -1).sum(axis=3)
    return *per_token, loads.max(axis=2).mean(axis=1), used.max(axis=2).mean(axis=1), loads.sum(axis=1)


class LayerMaps(NamedTuple):
    """The maps of a layer for choosing slots."""

    bounds: np.ndarray
    """Begin of each slot's share, as expert * WHOLE plus that part of WHOLE, in the order of `slots`."""
    slots: np.ndarray
    """Slots by expert."""
    slot_on: np.ndarray
    """Slot of an expert on a rank; -1: none."""

    @classmethod
    def of(cls, placement: ExpertPlacement) -> list[LayerMaps]:
        """Return the maps of all layers of a placement."""
        experts, shares = placement.expert_of_slot, placement.share_of_slot.astype(np.float64)
        slots = np.argsort(experts, axis=1, kind="stable")
        experts, shares = (np.take_along_axis(array, slots, axis=1) for array in (experts.astype(np.int64), shares))
        starts = np.cumsum(shares, axis=1) - shares
        is_first = np.diff(experts, axis=1, prepend=-1) != 0
        starts -= np.maximum.accumulate(np.where(is_first, starts, 0), axis=1)
        bounds = experts * WHOLE + np.clip(np.rint(starts * WHOLE), 0, WHOLE - 1).astype(np.int64)
        is_there = placement.slot_for // placement.slots_per_rank == np.arange(placement.ep_size)
        slot_on = np.where(is_there, placement.slot_for, -1)
        return [cls(*of_layer) for of_layer in zip(bounds, slots, slot_on, strict=True)]

    def slots_at(self, keys: np.ndarray) -> np.ndarray:
        """Return the slots by shares of assignments with `keys` of `share_keys`."""
        return self.slots[np.searchsorted(self.bounds, keys, side="right") - 1]


def keys_of(rows: np.ndarray, batches: Batches, *, num_experts: int) -> list[np.ndarray]:
    """Return the `share_keys` of each layer of `rows` [tokens, layers, k], which are the same for all placements."""
    ranks, num_tokens = batches.ranks, batches.num_tokens
    groups = batches.of_tokens * batches.num_ranks + ranks
    layers = (np.asarray(rows[:num_tokens, layer], np.int64) for layer in range(rows.shape[1]))
    return [
        share_keys(ids, ranks=ranks, groups=groups, num_experts=num_experts, num_ranks=batches.num_ranks)
        for ids in layers
    ]


def share_keys(
    ids: np.ndarray, *, ranks: np.ndarray, groups: np.ndarray, num_experts: int, num_ranks: int
) -> np.ndarray:
    """Return for every assignment [T, K] its expert * WHOLE plus its place, in parts of WHOLE, among the expert's.

    `ranks` [T] dispatch the tokens; tokens of the same of `groups` [T] are dispatched together.
    """
    keys = (groups[:, None] * num_experts + ids).reshape(-1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(begins, append=len(ordered))
    place, count = np.empty_like(keys), np.empty_like(keys)
    place[order] = np.arange(len(ordered)) - np.repeat(begins, counts)
    count[order] = np.repeat(counts, counts)
    step = ((1 << 32) // num_ranks) % (1 << 32)
    turn = (ranks[:, None].astype(np.uint64) * step + ids.astype(np.uint64) * GOLDEN) % (1 << 32)
    offsets = (turn >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24)
    fractions = (place.reshape(ids.shape).astype(np.float32) + offsets) / count.reshape(ids.shape).astype("f4")
    return ids * WHOLE + np.clip((fractions * np.float32(WHOLE)).astype(np.int64), 0, WHOLE - 2)


def nearest_slots(
    maps: LayerMaps, ids: np.ndarray, *, ranks: np.ndarray, by_shares: np.ndarray, num_slices: int = 1
) -> np.ndarray:
    """Return the slot of every assignment [T, K] that is nearest to its token and to the token's other experts.

    In this order: a slot of the token's own rank; of its slice; of a rank that the token needs for an expert without
    another replica; of the rank that holds most of the token's experts; the slot `by_shares` [T, K]; of the next rank.
    """
    num_ranks = maps.slot_on.shape[1]
    slot = maps.slot_on[ids]
    has = slot >= 0
    all_ranks, ranks, (num_tokens, top_k) = np.arange(num_ranks, dtype=np.int32), ranks.astype(np.int32), ids.shape
    is_own = all_ranks == ranks[:, None]
    is_alone = (has.sum(axis=2) == 1) & ~(has & is_own[:, None]).any(axis=2)
    is_needed = (has & is_alone[..., None]).any(axis=1)
    per_slice = num_ranks // num_slices
    is_near = all_ranks // per_slice == (ranks // per_slice)[:, None]
    points = 2 * has.sum(axis=1, dtype=np.int32)
    for is_so, number in ((is_own, OWN_POINTS), (is_near, SLICE_POINTS), (is_needed, NEEDED_POINTS)):
        points += np.int32(number) * is_so
    # Among equal ranks the next one after the token's own, so that tokens of different ranks spread.
    points = points * num_ranks + num_ranks - 1 - (all_ranks - ranks[:, None]) % num_ranks
    is_share = slot == by_shares[..., None].astype(np.int32)
    chosen = np.where(has, points[:, None] + num_ranks * is_share, -1).argmax(axis=2)
    return np.take_along_axis(slot, chosen[..., None], axis=2).reshape(num_tokens, top_k)
