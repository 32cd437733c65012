"""The pool is written in place, however wide its numbers are, and holds what was written."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.kv_pool import read_wide, write_kv
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import CPU
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.attention import attention_config
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec
from tests.support.models.attention_specs import attention_of, with_attention
from tests.support.models.core import CORE_CONFIG

PAGE = 16
SPEC = spec_from_hf(CORE_CONFIG.hf_config("float32"))
MODELS = {
    "all positions": SPEC,
    "windows": with_attention(SPEC, windows=(20, 0, 20)),
}


def test_bits_hold_what_bfloat16_holds():
    generator = np.random.default_rng(4)
    keys, values = jnp.asarray(generator.standard_normal((2, 9, 2, 8)), jnp.bfloat16)
    slots = jnp.asarray(generator.permutation(40)[:9], jnp.int32)
    plain = write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.bfloat16), keys, values, slots)
    bits = write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.uint16), keys, values, slots)
    np.testing.assert_array_equal(read_wide(bits), plain.astype(jnp.float32))
    table, positions = jnp.asarray([[1, 0, 2]]), jnp.asarray([[40, 41]])
    attended = [
        attention_reference.attend(keys[None, :2], pool, attention_reference.BlockPlaces(table, positions))
        for pool in (plain, bits)
    ]
    np.testing.assert_array_equal(*attended)


def test_attention_over_8_bits_is_attention_over_what_was_rounded_before():
    generator = np.random.default_rng(6)
    keys, values = jnp.asarray(generator.standard_normal((2, 9, 2, 8)), jnp.float32)
    slots = jnp.asarray(generator.permutation(40)[:9], jnp.int32)
    rounded = (heads.astype(jnp.float8_e4m3fn).astype(jnp.float32) for heads in (keys, values))
    pools = (
        write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.uint8), keys, values, slots),
        write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.float32), *rounded, slots),
    )
    places = attention_reference.BlockPlaces(jnp.asarray([[1, 0, 2]]), jnp.asarray([[40, 41]]))
    np.testing.assert_array_equal(*(attention_reference.attend(keys[None, :2], pool, places) for pool in pools))


def test_bits_hold_what_8_bits_hold_and_what_is_too_large_is_the_largest():
    generator = np.random.default_rng(5)
    keys, values = jnp.asarray(400 * generator.standard_normal((2, 9, 2, 8)), jnp.float32)
    slots = jnp.asarray(generator.permutation(40)[:9], jnp.int32)
    bits = read_wide(write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.uint8), keys, values, slots))
    plain = read_wide(write_kv(jnp.zeros((3, PAGE, 2, 16), jnp.float8_e4m3fn), keys, values, slots))
    np.testing.assert_array_equal(bits, plain)
    written = bits.reshape(-1, 4, 8)[slots]
    given = jnp.stack([keys, values], axis=2).reshape(9, 4, 8)
    assert float(abs(written).max()) == 448.0 < float(abs(given).max())
    np.testing.assert_allclose(written, jnp.clip(given, -448, 448), rtol=1 / 16, atol=2**-10)


def compiled_layers(spec: ModelSpec, dtype: str, *, num_pages: int):
    """All attention layers of a step as one program that keeps the pool, and its arguments.

    The step has four single tokens and a block of four.
    """
    specs = parameter_specs(spec, dtype=dtype)["gqa"]
    weights = {name: jnp.full(param.shape, 0.01, dtype) for name, param in specs.items()}
    own = attention_of(spec)
    shape = spec.num_layers * num_pages, PAGE, own.num_kv_heads, 2 * own.head_dim
    pool = jnp.zeros(shape, CPU.pool.dtypes.get(dtype, dtype))
    places = np.arange(8, dtype=np.int32)
    tables = np.tile(np.arange(1, 5, dtype=np.int32), (5, 1))
    batch = TokenBatch(np.zeros(8, np.int32), places, places + PAGE, tables, num_singles=4)

    def layers(pool: jax.Array, weights: dict[str, jax.Array], batch: TokenBatch):
        rotation = rotation_of(batch.positions_T, rope_frequencies(own.rope, own.head_dim))

        def visit(carry: tuple[jax.Array, jax.Array], layer: jax.Array):
            hidden, pool = carry
            inputs = AttentionInputs(weights, batch, rotation, layer)
            out, pool = CPU.attention.attend(hidden, pool, inputs, config=attention_config(own, spec))
            return (hidden + out.astype(dtype), pool), None

        hidden = jnp.ones((8, spec.hidden_size), dtype)
        return jax.lax.scan(visit, (hidden, pool), jnp.arange(spec.num_layers))[0]

    return jax.jit(layers, donate_argnums=0).lower(pool, weights, batch).compile(), (pool, weights, batch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_write_into_the_pool_they_were_given(spec, dtype):
    program, (pool, *_) = compiled_layers(spec, dtype, num_pages=4096)
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool.nbytes, "the pool goes out where it came in"
    assert analysis.temp_size_in_bytes < pool.nbytes // 10, "there is a second pool"


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_pool_takes_as_long_as_a_small_one(spec, dtype):
    programs = {pages: compiled_layers(spec, dtype, num_pages=pages) for pages in (300, 4096)}
    shortest = dict.fromkeys(programs, np.inf)
    for _ in range(30):
        for pages, (program, (pool, *others)) in programs.items():
            begun = time.perf_counter()
            _, pool = jax.block_until_ready(program(pool, *others))
            shortest[pages] = min(shortest[pages], time.perf_counter() - begun)
            programs[pages] = program, (pool, *others)
    assert shortest[4096] < 2 * shortest[300], shortest
