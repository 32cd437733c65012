"""The attention kernels compile for every chip, with the heads, pages and rules that are served."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.kv_pool import write_kv
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import TPU
from rayserve_moe.kernels.tpu.attention_ragged import attend_decode, attend_prefill
from rayserve_moe.tools.hlo_report import Piece, copies_of, kernels_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

WIDTH, NUM_PAGES = 128, 600
KERNEL = "ragged_paged_attention_kernel"


def attention_shapes(
    *, queries: int, heads: int, kv_heads: int, page_size: int, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, context=4096
):
    """Shapes of 16 blocks of `queries` tokens, and a pool of `NUM_PAGES`."""
    return (
        jax.ShapeDtypeStruct((16, queries, heads, WIDTH), dtype),
        jax.ShapeDtypeStruct((NUM_PAGES, page_size, 2 * kv_heads, WIDTH), kv_dtype),
        BlockPlaces(
            jax.ShapeDtypeStruct((16, context // page_size), np.int32), jax.ShapeDtypeStruct((16, queries), np.int32)
        ),
    )


def assert_compiles(chip: str, kernel: str, config: ScoreConfig = FULL_CAUSAL, **shapes) -> None:
    compiled = compile_for(chip, partial(ATTENTION[kernel], config=config), *attention_shapes(**shapes))
    assert kernels_of(text_of(compiled)) == {KERNEL: 1}


ATTENTION = {"ragged_decode": attend_decode, "ragged_prefill": attend_prefill}
CHIP = pytest.mark.parametrize("chip", TOPOLOGY_OF_CHIP)
HEADS = [(32, 4), (64, 4), (8, 1), (4, 1)]
MORE_CASES = pytest.mark.slow


@pytest.mark.sampled(2)
@CHIP
def test_decode_compiles(chip):
    assert_compiles(chip, "ragged_decode", queries=1, heads=32, kv_heads=4, page_size=16)


@pytest.mark.sampled(2)
@CHIP
def test_prefill_compiles(chip):
    assert_compiles(chip, "ragged_prefill", queries=32, heads=8, kv_heads=1, page_size=128)


@MORE_CASES
@CHIP
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_every_layout_compiles(chip, heads, kv_heads, page_size):
    for kernel, queries in (("ragged_decode", 1), ("ragged_prefill", 32)):
        assert_compiles(chip, kernel, queries=queries, heads=heads, kv_heads=kv_heads, page_size=page_size)


@pytest.mark.parametrize(
    "config",
    [ScoreConfig(window=128), ScoreConfig(window=100, scale=0.1, soft_cap=30.0)],
    ids=["window", "all"],
)
def test_windows_and_scores_compile(config):
    assert_compiles("v6e", "ragged_decode", config, queries=1, heads=8, kv_heads=1, page_size=128)
    assert_compiles("v6e", "ragged_prefill", config, queries=32, heads=8, kv_heads=1, page_size=128)


@pytest.mark.parametrize("chip", ["v6e", *(pytest.param(chip, marks=MORE_CASES) for chip in ("v5e", "v5p", "7x"))])
@pytest.mark.parametrize("kv_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_8_bit_pages_compile(chip, kv_dtype):
    assert_compiles(chip, "ragged_decode", queries=1, heads=32, kv_heads=4, page_size=128, kv_dtype=kv_dtype)


@MORE_CASES
@CHIP
def test_float32_compiles(chip):
    float32 = {"dtype": jnp.float32, "kv_dtype": jnp.float32}
    assert_compiles(chip, "ragged_decode", queries=1, heads=32, kv_heads=4, page_size=16, **float32)
    assert_compiles(chip, "ragged_prefill", queries=32, heads=32, kv_heads=4, page_size=16, **float32)


def test_long_page_tables_are_spread_over_several_calls():
    shapes = attention_shapes(queries=1, heads=8, kv_heads=1, page_size=16, context=16 * 24_000)
    compiled = compile_for("v6e", attend_decode, *shapes)
    assert kernels_of(text_of(compiled)) == {KERNEL: 2}


@pytest.mark.parametrize("chip", ["v6e", *(pytest.param(chip, marks=MORE_CASES) for chip in ("v5e", "v5p", "7x"))])
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_keys_and_values_are_written_in_place(chip, kv_dtype):
    """The pool goes through writing and attending without a copy, and comes out where it went in."""
    queries, pool, places = attention_shapes(queries=1, heads=32, kv_heads=4, page_size=16, kv_dtype=kv_dtype)
    heads, slots = jax.ShapeDtypeStruct((16, 4, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((16,), np.int32)

    def step(pool, queries, places, keys, values, slots):
        pool = write_kv(pool, keys, values, slots)
        return pool, attend_decode(queries, pool, places)

    compiled = compile_for(chip, step, pool, queries, places, heads, heads, slots, donate=0)
    analysis, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes // 10
    dtype = {jnp.bfloat16: "bf16", jnp.float8_e4m3fn: "f8e4m3fn"}[kv_dtype]
    assert copies_of(text_of(compiled), [Piece("kv", dtype, pool.shape[2:], pool.size // 2, is_written=True)]) == []


def test_layers_with_windows_of_their_own_share_one_pool():
    """Each distinct window has its kernels, called by the layers of one loop; the pool is copied by none of them."""
    heads, kv_heads, width, num_layers, page = 8, 2, 1024, 4, 16
    config = AttentionConfig(WIDTH, eps=1e-6, score_scale=0.1, windows=(128, 0, 128, 0))
    pool = jax.ShapeDtypeStruct((num_layers * NUM_PAGES, page, 2 * kv_heads, WIDTH), jnp.bfloat16)
    rows = {"q_LDH": (width, heads * WIDTH), "o_LHD": (heads * WIDTH, width)}
    rows |= dict.fromkeys(("k_LDG", "v_LDG"), (width, kv_heads * WIDTH))
    weights = [jax.ShapeDtypeStruct((num_layers, *shape), jnp.bfloat16) for shape in rows.values()]
    hidden = jax.ShapeDtypeStruct((16 + 2 * 32, width), jnp.bfloat16)
    places, tables = (jax.ShapeDtypeStruct(shape, np.int32) for shape in (hidden.shape[:1], (18, 64)))

    def step(pool, hidden, places, tables, *weights):
        batch = TokenBatch(places, places, places, tables, num_singles=16)
        rotation = rotation_of(places, np.ones(WIDTH // 2, np.float32))

        def visit(carry, layer):
            inputs = AttentionInputs(dict(zip(rows, weights, strict=True)), batch, rotation, layer)
            out, pool = TPU.attention.attend(*carry, inputs, config=config)
            return (carry[0] + out.astype(jnp.bfloat16), pool), None

        return jax.lax.scan(visit, (hidden, pool), jnp.arange(num_layers))[0]

    compiled = compile_for("v6e", step, pool, hidden, places, tables, *weights, donate=0)
    assert kernels_of(text_of(compiled)) == {KERNEL: 4 * num_layers}, "of single tokens and blocks, for two windows"
    analysis, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes // 2
    assert (
        copies_of(text_of(compiled), [Piece("kv", "bf16", pool.shape[2:], pool.size // num_layers, is_written=True)])
        == []
    )


def test_what_the_kernel_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="8-bit KV needs an even number of KV heads on a device, found 1"):
        assert_compiles(
            "v6e", "ragged_decode", queries=1, heads=8, kv_heads=1, page_size=128, kv_dtype=jnp.float8_e4m3fn
        )
