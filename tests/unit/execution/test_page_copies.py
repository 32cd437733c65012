"""The last page of a prompt is copied to the rows that forked off it, in every layer, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rayserve_moe.execution.step.page_copies import COPIES_SIZE, COPY_FIELDS, apply_copies, no_copies
from rayserve_moe.execution.step.pytrees import DeviceState, DraftState
from rayserve_moe.kernels.kv_pool import LayerPages, StatePages
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU, CPU_NATIVE
from tests.support.devices.rank_state import state_of_rows
from tests.support.kernels.native_kernels import need_native_kernels

PAGE, WIDTH, NUM_ROWS = 4, 3, 3
LAYERS = (LayerPages(0, 0, 20), LayerPages(1, 20, 12), LayerPages(0, 32, 20))
"""Layers of two tables: the second one, of layers with a window, has fewer pages."""


def state(dtype: np.dtype, num_groups: int, num_pages: int) -> DeviceState:
    generator = np.random.default_rng(3)
    table = generator.permutation(NUM_ROWS * WIDTH * num_groups).reshape(NUM_ROWS, -1).astype(np.int32) % 11 + 1
    pool = generator.integers(0, 250, (num_pages, PAGE, 2, 5)).astype(dtype)
    return state_of_rows(NUM_ROWS, page_table_RP=table, pools={"kv": (pool,)})


def vector_of(*copies: tuple[int, int, int, int]) -> np.ndarray:
    vector = no_copies()
    vector[: len(copies) * COPY_FIELDS] = np.array(copies).reshape(-1)
    return vector


def copied(before: DeviceState, vector: np.ndarray, kernels: Kernels, layers: tuple[LayerPages, ...]) -> DeviceState:
    @jax.jit
    def run(given: DeviceState) -> DeviceState:
        of_states = (StatePages("kv", layers),)
        return apply_copies(given, vector, data_rank=jnp.int32(1), layer_pages=of_states, copy=kernels.pool.copy_pages)

    return run(jax.tree.map(jnp.asarray, before))


@pytest.mark.parametrize(
    ("kernels", "dtype"), [(CPU, np.float32), (CPU, np.uint16), (CPU, np.uint8), (CPU_NATIVE, ml_dtypes.bfloat16)]
)
def test_pages_of_the_own_rank_that_end_inside_are_copied_in_all_layers(kernels, dtype):
    if kernels is CPU_NATIVE:
        need_native_kernels()
    before = state(np.dtype(dtype), num_groups=2, num_pages=52)
    others = (0, 0, 2, 5), (1, 0, 2, 8), (-1, 0, 0, 0)
    after = copied(before, vector_of((1, 0, 1, 5), *others[:2], (1, 0, 2, 11)), kernels, LAYERS)
    expected = before.pools["kv"][0].copy()
    for target, index in ((1, 1), (2, 2)):
        for group, first, _ in LAYERS:
            source, goal = (before.page_table_RP[row, 2 * index + group] for row in (0, target))
            expected[first + goal] = expected[first + source]
    np.testing.assert_array_equal(np.asarray(after.pools["kv"][0]).view(np.uint8), expected.view(np.uint8))
    for name in ("page_table_RP", "last_tokens_R", "sampling_floats_RF"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_the_pool_of_a_draft_model_is_that_of_one_layer():
    before = state(np.dtype(np.float32), num_groups=1, num_pages=40)
    own = np.random.default_rng(4).random((20, PAGE, 2, 5), np.float32)
    draft = DraftState(
        {"kv": (own,)}, np.zeros((NUM_ROWS, 2)), np.zeros(NUM_ROWS, np.int32), np.zeros((NUM_ROWS, 1), np.int32)
    )
    layers = LayerPages(0, 0, 20), LayerPages(0, 20, 20)
    after = copied(replace(before, draft=draft), vector_of((1, 2, 0, 3)), CPU, layers)
    source, target = before.page_table_RP[[2, 0], 0]
    own[target] = own[source]
    assert after.draft is not None
    np.testing.assert_array_equal(after.draft.pools["kv"][0], own)


def test_an_empty_vector_copies_nothing():
    before = state(np.dtype(np.float32), num_groups=2, num_pages=52)
    after = copied(before, no_copies(), CPU, LAYERS)
    assert len(no_copies()) == COPIES_SIZE
    np.testing.assert_array_equal(after.pools["kv"], before.pools["kv"])


@pytest.mark.parametrize("page", [-1, 7])
def test_the_native_kernel_refuses_pages_that_are_not_there(page):
    need_native_kernels()
    pool, places = jnp.ones((7, 2, 2, 2), jnp.bfloat16), jnp.array([3, page], jnp.int32)
    for sources, targets in ((places, places[::-1]), (places[::-1], places)):
        with pytest.raises(Exception, match="the pool has no such pages"):
            jax.block_until_ready(jax.jit(CPU_NATIVE.pool.copy_pages)(pool, sources, targets, jnp.int32(2)))


def test_rings_of_the_own_rank_are_copied_in_all_layers_wherever_a_prompt_ends():
    num_layers, generator = 2, np.random.default_rng(5)
    entry, *rings = (generator.random((num_layers * NUM_ROWS, size, 2)).astype(np.float32) for size in (1, 6, 4))
    before = state(np.dtype(np.float32), num_groups=1, num_pages=20)
    before = replace(before, pools={**before.pools, "delta": (entry, *rings)})

    @jax.jit
    def run(given: DeviceState) -> DeviceState:
        vector = vector_of((1, 0, 1, 5), (0, 2, 0, 6), (1, 0, 2, 2 * PAGE))
        of_states, num_rings = (StatePages("kv", LAYERS[:1]),), {"delta": (num_layers, len(rings))}
        copy = CPU.pool.copy_pages
        return apply_copies(
            given, vector, data_rank=jnp.int32(1), layer_pages=of_states, copy=copy, num_rings=num_rings
        )

    after = run(jax.tree.map(jnp.asarray, before)).pools["delta"]
    assert np.array_equal(after[0], entry), "entries stay"
    for ring, found in zip(rings, after[1:], strict=True):
        by_layer = ring.reshape(num_layers, NUM_ROWS, *ring.shape[1:])
        assert np.array_equal(np.asarray(found).reshape(by_layer.shape), by_layer[:, [0, 0, 0]])
