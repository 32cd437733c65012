"""The index of block-sparse attention chooses the best blocks, ties to the lower block, however a prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.kv_pool import kv_rows
from rayserve_moe.kernels.packed_blocks import unpacked_kv, unsupported_blocks, unsupported_by_kernel
from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.reference.block_index import BlockChoice, choose_blocks
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import BLOCK_ATTENTION, KERNELS
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes, packed_kv, packed_width
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layers.attention import BLOCKS, BlockIndex, GroupedAttention, attention_config
from rayserve_moe.model.layers.block_attention import index_config
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import FAMILY_CASES, config_of
from tests.unit.kernels.latent_runs import CUTS, LAYER, LENGTH, NUM_PAGES, PAGE, PAGES, Chunks, batch_of

KERNELS_OF = {"cpu": jnp.float32, "cpu_native": jnp.bfloat16, "tpu": jnp.float32}
"""Dtypes by table. Block-sparse attention of TPUs is by XLA here, over their rows; for kernels see `chosen_tokens`."""
INDEXES = {
    "blocks within a span": BlockIndex(2, 16, block_size=12, top_k=4),
    "blocks of spans, first ones": BlockIndex(1, 18, block_size=64, top_k=2, first_blocks=1),
    "blocks of a page, local ones": BlockIndex(4, 16, block_size=16, top_k=5, local_blocks=2),
}


@cache
def model_of(name: str) -> ModelSpec:
    (case,) = (case for case in FAMILY_CASES if case.name == "minimax_m3_vl_text-1")
    spec = spec_from_config(config_of(case))
    (own,) = spec.mixers
    return replace(spec, mixers=(replace(own, index=INDEXES[name]),))


def mixer_of(spec: ModelSpec) -> GroupedAttention:
    own = spec.mixer(BLOCKS)
    assert isinstance(own, GroupedAttention)
    return own


def expected(scores: np.ndarray, position: int, choice: BlockChoice) -> np.ndarray:
    """The best blocks of a query by its products with the keys up to its position, ascending with -1 behind."""
    own, size = position // choice.block_size, choice.block_size
    seen = scores[: position + 1]
    of_blocks = [seen[block * size : (block + 1) * size].max() for block in range(own + 1)]
    for block in range(own + 1):
        if block < choice.first_blocks or block > own - choice.local_blocks:
            of_blocks[block] = np.inf
    best = sorted(range(own + 1), key=lambda block: (-of_blocks[block], block))[: choice.top_k]
    return np.array(sorted(best) + [-1] * (choice.top_k - len(best)))


@pytest.mark.parametrize("forced", [(0, 1), (1, 2), (0, 0), (2, 0)])
def test_equal_scores_go_to_the_lower_block(forced: tuple[int, int]):
    """Scores are small integers with many ties; zeros have either sign."""
    generator, choice = np.random.default_rng(5), BlockChoice(5, 4, *forced)
    queries, keys = generator.integers(-1, 2, (1, 8, 3, 4)), generator.integers(-1, 2, (64, 4))
    positions = np.array([[3, 19, 20, 24, 30, 62, 63, -1]], np.int32)
    pages = jnp.asarray(keys.reshape(4, 16, 1, 4)[[2, 0, 3, 1]], jnp.float32)
    pages = jnp.concatenate([pages, jnp.full((1, 16, 1, 4), jnp.nan)])
    places = BlockPlaces(jnp.asarray([[1, 3, 0, 2]]), jnp.asarray(positions))
    chosen = np.asarray(choose_blocks(jnp.asarray(queries, jnp.float32), pages, places, choice=choice))
    for query, position in enumerate(positions[0, :-1]):
        for head in range(3):
            scores = keys @ queries[0, query, head]
            np.testing.assert_array_equal(chosen[0, query, head], expected(scores, position, choice))
    assert (chosen[0, -1] == -1).all()


class Found(NamedTuple):
    """The results of a sequence that is computed chunk by chunk."""

    chosen_TAK: np.ndarray
    outputs_TD: np.ndarray
    dense_TD: np.ndarray


@cache
def weights_of(kernels: str, name: str) -> dict[str, jax.Array]:
    generator, layouts = np.random.default_rng(11), KERNELS[kernels].parameters.layouts
    spec, found = model_of(name), {}
    for weight, of in parameter_specs(spec, dtype="bfloat16")[BLOCKS].items():
        array = jnp.asarray(generator.standard_normal(of.shape) * 0.3 + ("norm" in weight), of.dtype)
        dtype = array.dtype if of.dtype == "float32" else KERNELS_OF[kernels]
        found[weight] = jnp.asarray(LAYOUTS[layouts.get(weight, "")](np.asarray(array.astype(dtype))))
    return found


@cache
def compiled(kernels: str, name: str, top_k: int):
    spec, attention = model_of(name), BLOCK_ATTENTION[kernels][-1].run
    own = mixer_of(spec)
    of_index = index_config(own, spec)
    of_index = replace(of_index, choice=replace(of_index.choice, top_k=top_k))
    frequencies = rope_frequencies(own.rope, own.rotary_width)
    repeats = own.num_kv_heads // of_index.num_heads

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pools: tuple[jax.Array, ...], batch: TokenBatch):
        inputs = AttentionInputs(weights, batch, rotation_of(batch.positions_T, frequencies), jnp.int32(LAYER))
        assert attention.choose_blocks is not None
        chosen, keys = attention.choose_blocks(hidden, pools[1], inputs, config=of_index)
        config = attention_config(own, spec)
        of_heads = jnp.repeat(chosen, repeats, axis=1)
        out, rows = attention.attend(hidden, pools[0], inputs._replace(chosen_TK=of_heads), config=config)
        dense = out
        if kernels != "tpu":
            dense, _ = attention.attend(hidden, pools[0], inputs, config=config)
        return chosen, out, dense, (rows, keys)

    return jax.jit(layer)


def run(kernels: str, name: str, chunks: Chunks, *, top_k: int = 0, nan_keys: Sequence[int] = ()) -> Found:
    """Return the choice and the outputs of a sequence, and dense outputs; unwritten rows are NaN.

    Keys of the index at `nan_keys` are NaN after the first chunk.
    """
    spec, dtype = model_of(name), KERNELS_OF[kernels]
    own, index = mixer_of(spec), INDEXES[name]
    hidden = np.random.default_rng(9).standard_normal((LENGTH, spec.hidden_size)).astype(np.float32)
    row = (own.num_kv_heads, own.head_dim + own.value_width)
    shapes = [row, (1, index.head_dim)]
    if kernels == "tpu":
        width = packed_width(own.num_kv_heads, own.head_dim, own.value_width)
        shapes = [(width,), (latent_lanes(index.head_dim),)]
    num_pages = spec.num_layers * NUM_PAGES
    pools = tuple(jnp.full((num_pages, PAGE, *shape), jnp.nan, dtype) for shape in shapes)
    found, first = [], 0
    for count in chunks:
        batch, places = batch_of(first, count)
        padded = np.zeros((len(batch.positions_T), spec.hidden_size), np.float32)
        padded[places] = hidden[first : first + count]
        layer = compiled(kernels, name, top_k or index.top_k)
        *parts, pools = layer(jnp.asarray(padded, dtype), weights_of(kernels, name), pools, batch)
        found.append([np.asarray(part)[places] for part in parts])
        if not first:
            pools = pools[0], _with_nan(pools[1], np.asarray(nan_keys, np.int32))
        first += count
    return Found(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _with_nan(pool: jax.Array, positions: np.ndarray) -> jax.Array:
    rows = LAYER * NUM_PAGES * PAGE + PAGES[positions // PAGE] * PAGE + positions % PAGE
    return pool.reshape(-1, *pool.shape[2:]).at[rows].set(jnp.nan).reshape(pool.shape)


@pytest.fixture(params=KERNELS_OF)
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native":
        need_native_kernels()
    return request.param


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", INDEXES)
def test_a_token_chooses_the_same_however_its_prompt_is_cut(kernels: str, name: str):
    """By native kernels its output has the same bits, too."""
    whole, *others = (run(kernels, name, chunks) for chunks in CUTS.values())
    index, own = INDEXES[name], np.arange(LENGTH) // INDEXES[name].block_size
    counts = np.minimum(own + 1, index.top_k)
    np.testing.assert_array_equal((whole.chosen_TAK >= 0).sum(2), counts[:, None].repeat(index.num_heads, 1))
    assert (whole.chosen_TAK.max(2) == own[:, None]).all(), "every token sees its own block"
    for found in others:
        np.testing.assert_array_equal(found.chosen_TAK, whole.chosen_TAK)
        if kernels == "cpu_native":
            np.testing.assert_array_equal(found.outputs_TD, whole.outputs_TD)
        else:
            np.testing.assert_allclose(found.outputs_TD, whole.outputs_TD, rtol=0, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", INDEXES)
def test_contexts_within_the_choice_have_the_bits_of_dense_attention(kernels: str, name: str):
    """The first tokens see all blocks; of the others none has the output of dense attention."""
    if kernels == "tpu":
        pytest.skip("a kernel of TPUs computes it")
    found = run(kernels, name, CUTS["chunks that end within blocks and pages"])
    limit = INDEXES[name].block_size * INDEXES[name].top_k
    np.testing.assert_array_equal(found.outputs_TD[:limit], found.dense_TD[:limit])
    assert (found.outputs_TD[limit:] != found.dense_TD[limit:]).any(axis=1).all()
    whole = run(kernels, name, CUTS["a prompt, then decoding"], top_k=LENGTH)
    np.testing.assert_array_equal(whole.outputs_TD, whole.dense_TD)


@pytest.mark.parametrize("num_nan", [1, 9], ids=["fewer than are chosen", "more"])
def test_blocks_with_a_key_that_is_nan_are_chosen_by_every_table(kernels: str, num_nan: int):
    """Without these keys the choice would hide that a token is not finite: the first and the last key of a block."""
    name, generator = "blocks within a span", np.random.default_rng(4)
    index = INDEXES[name]
    blocks = np.sort(generator.permutation(LENGTH // index.block_size - 1)[:num_nan])
    places = np.concatenate([blocks[::2] * index.block_size, (blocks[1::2] + 1) * index.block_size - 1])
    found = run(kernels, name, [LENGTH - 1, 1], nan_keys=places)
    wanted = {*blocks.tolist(), (LENGTH - 1) // index.block_size}
    for chosen in found.chosen_TAK[-1]:
        assert {*sorted(wanted)[: index.top_k]} <= {*chosen.tolist()} and (chosen >= 0).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", INDEXES)
def test_rows_of_tpus_come_to_the_same(name: str):
    packed, exact = (run(kernels, name, CUTS["a prompt, then decoding"]) for kernels in ("tpu", "cpu"))
    np.testing.assert_array_equal(packed.chosen_TAK, exact.chosen_TAK)
    np.testing.assert_allclose(packed.outputs_TD, exact.outputs_TD, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kv_heads", "head_dim", "value_dim"), [(2, 64, 64), (1, 32, 32), (3, 16, 16), (2, 192, 128)])
def test_packed_rows_are_unpacked(kv_heads: int, head_dim: int, value_dim: int):
    """Also those in which heads are repeated to fill a register."""
    generator = np.random.default_rng(1)
    keys, values = (
        jnp.asarray(generator.standard_normal((5, kv_heads, size)), jnp.float32) for size in (head_dim, value_dim)
    )
    rows = packed_kv(keys, values)
    unpacked = unpacked_kv(rows, num_kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    np.testing.assert_array_equal(unpacked, kv_rows(keys, values))


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (PoolFormat(128), ""),
        (PoolFormat(128, is_8_bit=True), "kv_cache_dtype fp8 does not store the keys of an index"),
        (PoolFormat(24), "page_size 24 is no multiple of 16"),
    ],
)
def test_pools_that_tpus_do_not_take_are_named(pool: PoolFormat, reason: str):
    assert unsupported_blocks(pool, head_dim=128, value_dim=128, block_size=128) == reason


@pytest.mark.parametrize(
    ("page_size", "head_dim", "block_size", "reason"),
    [
        (128, 128, 128, ""),
        (16, 256, 128, ""),
        (128, 64, 128, "heads of 64 elements share registers"),
        (64, 128, 64, "blocks of 64 in pages of 64"),
        (256, 128, 128, "blocks of 128 in pages of 256"),
        (8, 128, 128, "page_size 8 is no multiple of 16"),
    ],
)
def test_blocks_that_the_kernel_does_not_take_are_left_to_xla(page_size, head_dim, block_size, reason):
    sizes = {"head_dim": head_dim, "value_dim": head_dim, "block_size": block_size}
    found = unsupported_by_kernel(PoolFormat(page_size), **sizes)
    assert reason in found and bool(reason) == bool(found)
    assert "fp8" in unsupported_by_kernel(PoolFormat(page_size, is_8_bit=True), **sizes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", INDEXES)
def test_native_kernels_compute_the_definition(name: str):
    """In bfloat16 both round queries and keys alike: where the choices differ, a few scores are nearly equal."""
    need_native_kernels()
    native, exact = (run(kernels, name, [LENGTH]) for kernels in ("cpu_native", "cpu"))
    differs = (native.chosen_TAK != exact.chosen_TAK).any((1, 2))
    assert differs.mean() < 0.1
    scale = np.sqrt(np.mean(exact.outputs_TD**2))
    assert np.abs(native.outputs_TD - exact.outputs_TD)[~differs].max() < 0.15 * scale
