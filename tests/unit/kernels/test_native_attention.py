"""Attention by the native CPU kernel is attention by pure JAX, whoever shares the step."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native.calls import PROJECTIONS
from rayserve_moe.kernels.cpu_native.layout import HEAD_WIDTHS, pack
from rayserve_moe.kernels.layers import rotation_of
from rayserve_moe.kernels.registry import CPU, CPU_NATIVE, Kernels
from rayserve_moe.model.attention import attention_config, rope_frequencies
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec
from tests.support.native import need_native_kernels

PAGE, BLOCK, NUM_LAYERS, LAYER = 16, 8, 2, 1
PAGES_OF = np.array([[3, 1, 7, 5], [2, 4, 6, 8], [9, 10, 11, 12]], np.int32)
"""Pages of three sequences; those of others, and page 0, hold NaN."""
NUM_PAGES = 14


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


def spec_with(**changes: object) -> ModelSpec:
    config = {**asdict(replace(PRESETS["tiny"], num_hidden_layers=NUM_LAYERS, num_attention_heads=6)), **changes}
    return spec_from_hf(config)


def drawn_weights(spec: ModelSpec) -> dict[str, jax.Array]:
    generator = np.random.default_rng(1)
    specs = parameter_specs(spec, dtype="bfloat16")["attention"]
    return {
        name: jnp.asarray(generator.standard_normal(p.shape) * 0.1 + (p.initial == "ones"), jnp.bfloat16)
        for name, p in specs.items()
    }


def batch_of(singles: list[tuple[int, int]], blocks: list[tuple[int, int, int]]) -> TokenBatch:
    """Single tokens (sequence, position), then blocks (sequence, first position, number of tokens); -1 is nobody."""
    positions = [position for _, position in singles]
    sequences = [sequence for sequence, _ in singles]
    for sequence, first, count in blocks:
        positions += [*range(first, first + count), *[-1] * (BLOCK - count)]
        sequences += [sequence] * BLOCK
    tables = PAGES_OF[[sequence for sequence, *_ in [*singles, *blocks]]]
    slots = [
        PAGES_OF[sequence, position // PAGE] * PAGE + position % PAGE if position >= 0 else 0
        for sequence, position in zip(sequences, positions, strict=True)
    ]
    arrays = (np.asarray(numbers, np.int32) for numbers in (np.zeros(len(slots)), positions, slots, tables))
    return TokenBatch(*arrays, num_singles=len(singles))


def pool_of(spec: ModelSpec) -> jax.Array:
    shape = (NUM_LAYERS, NUM_PAGES, PAGE, 2 * spec.attention.num_kv_heads, spec.attention.head_dim)
    pool = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    pool[:, np.setdiff1d(np.arange(NUM_PAGES), PAGES_OF)] = np.nan
    return jnp.asarray(pool, jnp.bfloat16).reshape(-1, *shape[2:])


def run(kernels: Kernels, spec: ModelSpec, batch: TokenBatch, hidden: jax.Array, weights: dict[str, jax.Array]):
    """Output [T, D] and the pool, as one compiled program: the pool is written in place there."""

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pool: jax.Array, batch: TokenBatch):
        rotation = rotation_of(batch.positions_T, rope_frequencies(spec.rope, spec.attention.head_dim))
        inputs = AttentionInputs(weights, batch, rotation, jnp.int32(LAYER))
        out, pool = kernels.attention(hidden, pool, inputs, config=attention_config(spec))
        return out.astype(hidden.dtype), pool

    out, pool = jax.jit(layer)(hidden, weights, pool_of(spec), batch)
    return np.asarray(out, np.float32), np.asarray(pool, np.float32)


def both_ways(spec: ModelSpec, batch: TokenBatch, hidden: jax.Array):
    weights = drawn_weights(spec)
    packed = {name: pack(array) if name in PROJECTIONS else array for name, array in weights.items()}
    return run(CPU_NATIVE, spec, batch, hidden, packed), run(CPU, spec, batch, hidden, weights)


def drawn_hidden(num_tokens: int, width: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(num_tokens).standard_normal((num_tokens, width)), jnp.bfloat16)


MIXED = "both, with an empty block"
CASES = {
    "one token": ([(0, 0)], []),
    "single tokens, and nobody": ([(0, 37), (1, 15), (2, -1), (2, 63)], []),
    "blocks, one not full": ([], [(0, 0, 8), (0, 8, 3), (2, 30, 8)]),
    MIXED: ([(1, 50), (1, -1)], [(0, 25, 8), (2, 0, 0), (0, 33, 8)]),
}
MODELS = {
    "norms of heads": {},
    "biases": {"attention_bias": True},
    "a head per head": {"num_key_value_heads": 6},
    **{f"heads of {width}": {"head_dim": width} for width in HEAD_WIDTHS},
}


@pytest.mark.parametrize(
    ("model", "case"), [*(("norms of heads", case) for case in CASES), *((model, MIXED) for model in list(MODELS)[1:])]
)
def test_it_is_the_pure_layer(model, case):
    spec, batch = spec_with(**MODELS[model]), batch_of(*CASES[case])
    hidden = drawn_hidden(len(batch.positions_T), spec.hidden_size)
    (out, pool), (expected, expected_pool) = both_ways(spec, batch, hidden)
    here = batch.positions_T >= 0
    # Queries, keys and attended values round to 8 bits on either side, and then the result does.
    np.testing.assert_allclose(out[here], expected[here], rtol=2**-7, atol=2**-6 * np.abs(expected[here]).max())
    used = np.unique(PAGES_OF) + LAYER * NUM_PAGES
    np.testing.assert_allclose(pool[used], expected_pool[used], rtol=2**-6, atol=2**-6)
    others = np.setdiff1d(np.arange(len(pool)), used)
    untouched = np.setdiff1d(others, [LAYER * NUM_PAGES])
    np.testing.assert_array_equal(pool[untouched], np.asarray(pool_of(spec), np.float32)[untouched])


def test_a_token_comes_out_the_same_alone_in_company_and_in_a_block():
    spec = spec_with()
    hidden = drawn_hidden(BLOCK, spec.hidden_size)
    in_block, pool = both_ways(spec, batch_of([], [(0, 33, 8)]), hidden)[0]
    padded = jnp.concatenate([drawn_hidden(3, spec.hidden_size), hidden[:5], jnp.zeros_like(hidden[:3])])
    in_company, _ = both_ways(spec, batch_of([(1, 3), (2, 60), (2, -1)], [(0, 33, 5)]), padded)[0]
    np.testing.assert_array_equal(in_company[3:8], in_block[:5])
    alone, one_written = both_ways(spec, batch_of([(0, 33)], []), hidden[:1])[0]
    np.testing.assert_array_equal(alone, in_block[:1])
    slot = PAGES_OF[0, 2] + LAYER * NUM_PAGES, 1
    np.testing.assert_array_equal(one_written[slot], pool[slot])


def test_heads_that_it_was_not_compiled_for_are_refused():
    spec, batch = spec_with(head_dim=192), batch_of([(0, 5)], [])
    with pytest.raises(Exception, match="no such heads"):
        both_ways(spec, batch, drawn_hidden(1, spec.hidden_size))


@pytest.mark.parametrize(
    "changes",
    [
        {"page_table_BP": np.full((1, 4), NUM_PAGES, np.int32)},
        {"page_table_BP": np.full((1, 4), -1, np.int32)},
        {"kv_slots_T": np.full(1, NUM_PAGES * PAGE, np.int32)},
        {"kv_slots_T": np.full(1, -1, np.int32)},
        {"positions_T": np.full(1, 4 * PAGE, np.int32)},
    ],
)
def test_places_outside_the_pool_are_refused(changes):
    spec = spec_with()
    batch = replace(batch_of([(0, 5)], []), **changes)
    hidden, weights = drawn_hidden(1, spec.hidden_size), drawn_weights(spec)
    packed = {name: pack(array) if name in PROJECTIONS else array for name, array in weights.items()}
    with pytest.raises(Exception, match="lies outside the pool"):
        run(CPU_NATIVE, spec, batch, hidden, packed)
