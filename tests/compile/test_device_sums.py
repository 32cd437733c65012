"""The exchange by device sums for TPUs: its kernels need no copies, and rows move while others are multiplied."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from rayserve_moe.kernels.reference.device_sums import SlotLists
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.tpu import device_rows, device_sums
from tests.compile.test_fused_exchange import compiled, products_during_exchanges
from tests.compile.topologies import compile_for

RANKS, TOKENS, TOP_K, SLOTS, WIDTH, INNER = 8, 528, 8, 16, 2048, 768


def shaped(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def sums(rows: jax.Array, lists: SlotLists, weights: ExpertWeights) -> jax.Array:
    return device_sums.sum_experts(rows, lists, LayerExperts(weights, 0, ProductConfig(SLOTS, 8.0)))


def test_its_kernels_compile_without_a_copy():
    matrix = partial(shaped, dtype="bfloat16")
    weights = ExpertWeights(
        matrix(SLOTS, WIDTH, INNER), matrix(SLOTS, WIDTH, INNER), matrix(SLOTS, INNER, WIDTH), None, None, None
    )
    rows = shaped(RANKS * TOKENS, WIDTH // 256, 128, dtype="uint32")
    assigned = TOKENS * TOP_K
    gates = shaped(RANKS, assigned, dtype="float32")
    lists = SlotLists(shaped(RANKS, SLOTS + 1), shaped(RANKS + 1), shaped(RANKS, assigned), gates)
    calls = {
        "device_sums": (sums, rows, lists, weights),
        "place_rows": (device_rows.place_rows, matrix(TOKENS, WIDTH), shaped(RANKS * TOKENS), shaped()),
        "add_rows": (device_rows.add_rows, rows, shaped(RANKS, TOKENS), shaped()),
    }
    for name, (run, *shapes) in calls.items():
        found = compile_for("v6e", run, *shapes)
        text = found.as_text()
        assert f"%{name}" in text and "tpu_custom_call" in text
        # Only scalars are padded, never rows or weights.
        assert found.memory_analysis().temp_size_in_bytes <= 2 * 4 * RANKS * (assigned + 1024), name


@pytest.mark.slow
def test_a_chunk_moves_while_the_other_is_multiplied():
    during = products_during_exchanges(compiled("v6e:2x4", 512, "device_sums"), product="device_sums")
    assert len(during) == 4, "two chunks, out and back"
    assert sum(num_products > 0 for num_products in during) == 2
