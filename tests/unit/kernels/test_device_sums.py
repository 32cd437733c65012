"""Rows of devices: the kernels of TPUs, interpreted, give what plain XLA gives, and planted faults are found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference import device_sums as reference
from rayserve_moe.kernels.reference.device_sums import SlotLists
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
)
from rayserve_moe.kernels.tpu import device_rows, device_sums
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, watch

RANKS, TOKENS, SLOTS, TOP_K, WIDTH, INNER, ME = 3, 48, 4, 3, 256, 128, 1
ROUNDING = 2**-7
"""Maximum difference of a sum in bfloat16, relative to the largest sum."""


@dataclass(frozen=True)
class Load:
    """Slots of the tokens of all ranks; this device is rank `ME`."""

    slots_RTK: np.ndarray

    @cached_property
    def is_here_RT(self) -> np.ndarray:
        return (self.slots_RTK // SLOTS == ME).any(axis=2)

    @cached_property
    def lists(self) -> SlotLists:
        places, gates, begins = [], [], []
        for rank, (slots_TK, is_here_T) in enumerate(zip(self.slots_RTK, self.is_here_RT, strict=True)):
            slots_A, token_A = slots_TK.reshape(-1), np.repeat(np.arange(TOKENS), TOP_K)
            order_A = np.lexsort((token_A, slots_A))
            place_T = np.cumsum(is_here_T) - is_here_T
            places.append(np.where(slots_A // SLOTS == ME, place_T[token_A], 7)[order_A])
            gates.append(np.random.default_rng(rank).random(slots_A.size)[order_A])
            begins.append(np.searchsorted(slots_A[order_A], np.arange(ME * SLOTS, (ME + 1) * SLOTS + 1)))
        base = np.concatenate([[0], np.cumsum(self.is_here_RT.sum(axis=1))])
        arrays = (np.stack(begins), base, np.stack(places))
        return SlotLists(*(jnp.asarray(a, jnp.int32) for a in arrays), jnp.asarray(np.stack(gates), jnp.float32))

    @property
    def num_rows(self) -> int:
        return int(self.is_here_RT.sum())


def drawn(chance_of_one_slot: float = 0.0, share: float = 1.0) -> Load:
    generator = np.random.default_rng(7)
    slots = np.argsort(generator.random((RANKS, TOKENS, RANKS * SLOTS)), axis=2)[..., :TOP_K]
    is_hot = generator.random((RANKS, TOKENS)) < chance_of_one_slot
    slots[..., 0] = np.where(is_hot, ME * SLOTS + 2, np.where(slots[..., 0] == ME * SLOTS + 2, 0, slots[..., 0]))
    slots[..., 1:] = np.where(slots[..., 1:] == ME * SLOTS + 2, RANKS * SLOTS, slots[..., 1:])
    return Load(np.where(generator.random((RANKS, TOKENS, 1)) < share, slots, RANKS * SLOTS))


LOADS = {
    "any": drawn(0.3),
    "a tile and more of one slot": drawn(1.0),
    "few tokens": drawn(0.2, share=0.1),
    "nothing": drawn(share=0.0),
}


def experts() -> LayerExperts:
    generator = np.random.default_rng(5)
    shapes = [(2 * SLOTS, WIDTH, INNER), (2 * SLOTS, WIDTH, INNER), (2 * SLOTS, INNER, WIDTH)]
    weights = (jnp.asarray(generator.standard_normal(shape) / 8, jnp.bfloat16) for shape in shapes)
    return LayerExperts(ExpertWeights(*weights), jnp.asarray(SLOTS, jnp.int32), ProductConfig(SLOTS, 8.0))


def rows_of(number: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal((number, WIDTH)), jnp.bfloat16)


def words_of(rows_ND: jax.Array) -> jax.Array:
    """Words [N, Q, 128] of rows."""
    bits = np.asarray(rows_ND).view(np.uint16).astype(np.uint32)
    return jnp.asarray(bits[:, : WIDTH // 2] | bits[:, WIDTH // 2 :] << 16).reshape(len(bits), -1, 128)


def numbers_of(words: jax.Array) -> np.ndarray:
    """Rows [N, D] of words, in float32."""
    bits = np.asarray(words).reshape(len(words), -1)
    return np.concatenate([(bits << 16).view(np.float32), (bits & 0xFFFF0000).view(np.float32)], axis=1)


def outcome_of_sums(load: Load, interpret: Any = INTERPRETED) -> tuple[float, float]:
    """The largest difference from the reference, and the largest sum."""
    rows = rows_of(RANKS * TOKENS)
    found = device_sums.sum_experts(words_of(rows), load.lists, experts(), interpret=interpret)
    expected = reference.sum_experts(rows[:, None], load.lists, experts(), multiply=multiply_in_blocks)[:, 0]
    expected = np.asarray(expected, np.float32)[: load.num_rows]
    difference = np.abs(numbers_of(found)[: load.num_rows] - expected)
    return float(difference.max(initial=0)), float(np.abs(expected).max(initial=0))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_sums_of_a_device_are_those_of_the_reference(load):
    difference, largest = outcome_of_sums(load)
    assert difference <= ROUNDING * largest


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_rows_beside_it():
    """The same tokens, with those of other ranks gone: equal to the bit."""
    whole, alone = LOADS["any"], Load(LOADS["any"].slots_RTK.copy())
    alone.slots_RTK[:ME] = RANKS * SLOTS
    rows = words_of(rows_of(RANKS * TOKENS))
    first, end = (int(whole.lists.base_R[rank]) for rank in (ME, RANKS))
    of_all = device_sums.sum_experts(rows, whole.lists, experts(), interpret=INTERPRETED)[first:end]
    own = jnp.concatenate([rows[first:], rows[:first]])
    of_few = device_sums.sum_experts(own, alone.lists, experts(), interpret=INTERPRETED)[: end - first]
    np.testing.assert_array_equal(of_all, of_few)


def test_tokens_become_rows_and_rows_are_added_up():
    generator = np.random.default_rng(2)
    hidden, num_rows = rows_of(TOKENS), 101
    tokens = jnp.asarray(generator.integers(0, TOKENS, RANKS * TOKENS), jnp.int32)
    sent = device_rows.place_rows(hidden, tokens, jnp.int32(num_rows), interpret=INTERPRETED)
    expected = reference.place_rows(hidden, tokens, jnp.int32(num_rows)).reshape(-1, WIDTH)
    np.testing.assert_array_equal(numbers_of(sent)[:num_rows], np.asarray(expected, np.float32)[:num_rows])
    rows, is_row = rows_of(RANKS * TOKENS), generator.random((RANKS, TOKENS)) < 0.6
    numbers = np.cumsum(is_row.reshape(-1)).reshape(RANKS, TOKENS) - 1
    places = jnp.asarray(np.where(is_row, numbers, RANKS * TOKENS), jnp.int32)
    found = device_rows.add_rows(words_of(rows), places, jnp.int32(is_row.sum()), interpret=INTERPRETED)
    np.testing.assert_array_equal(found, reference.add_rows(rows[:, None], places, jnp.int32(is_row.sum())))


def padding_with_a_row(monkeypatch):
    """The last tile of a slot is padded with a row that is in use: its sum is read early, and written late."""
    monkeypatch.setattr(device_sums, "spare_row", lambda _: 0)


def test_rows_fit_into_both_memories_of_a_core():
    rows = device_sums.max_rows(2048, 768, 8)
    assert rows // 8 == 853 and device_sums.vmem_bytes(rows, 2048, 768) <= device_sums.MAX_BYTES
    assert device_sums.max_rows(2048, 768, 32) * 8 * 33 <= device_sums.SCALAR_BYTES
    assert device_sums.max_rows(8192, 4096, 8) == 0


def test_larger_experts_leave_too_little_space():
    """The figures of ADR 0046: of Qwen3-235B-A22B on 64 devices, and on cores of 64 MiB; of DeepSeek-V3 in 8 bits."""
    assert device_sums.max_rows(4096, 1536, 8) // 64 == 17
    both_buffers = 2 * 3 * 4096 * 1536 * 2
    assert both_buffers == 72 << 20 and device_sums.vmem_bytes(0, 4096, 1536) > 64 << 20
    assert 2 * 3 * 7168 * 2048 == 84 << 20


def no_wait_for_rows(monkeypatch):
    copy = device_sums.pltpu.make_async_copy

    class Begun:
        def __init__(self, *given):
            self.start = copy(*given).start

        def wait(self):
            return None

    monkeypatch.setattr(device_sums.pltpu, "make_async_copy", Begun)


FAULTS = {"no wait for rows": no_wait_for_rows, "padding with a row in use": padding_with_a_row}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found(plant, monkeypatch):
    watch()
    FAULTS_FOUND.begin()
    plant(monkeypatch)
    try:
        difference, largest = outcome_of_sums(LOADS["any"])
    except Exception:  # noqa: BLE001 (whatever a planted fault raises)
        return
    assert FAULTS_FOUND.racing or FAULTS_FOUND.left or not difference <= ROUNDING * largest
