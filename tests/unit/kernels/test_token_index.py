"""The index of sparse attention chooses the best tokens, ties to the lower position, however a prompt is cut."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.reference.token_index import choose_tokens
from rayserve_moe.kernels.table import KERNELS, SPARSE_ATTENTION
from rayserve_moe.kernels.token_index import IndexConfig
from tests.support.kernels.native_kernels import need_native_kernels
from tests.unit.kernels.latent_cases import LatentModel
from tests.unit.kernels.latent_runs import CUTS, LAYER, LENGTH, NUM_PAGES, PAGE, PAGES, THETA, Chunks, batch_of, drawn

MODEL = LatentModel(64, q_lora=34)
HEADS, WIDTH, TOP_K = 6, 18, 40
KERNELS_OF = {"cpu": jnp.float32, "cpu_native": jnp.bfloat16}
"""Dtypes by table; for kernels of TPUs see `test_chosen_tokens`."""


def expected(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The positions of the best scores of a query, ascending with -1 behind."""
    best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:top_k]
    return np.array(sorted(best) + [-1] * (top_k - len(best)))


def test_equal_scores_go_to_the_lower_position():
    """Scores are small integers with many ties; zeros have either sign."""
    generator = np.random.default_rng(5)
    queries, weights = generator.integers(-1, 2, (1, 8, 3, 4)), generator.integers(-2, 3, (1, 8, 3))
    keys, positions = generator.integers(-1, 2, (64, 4)), np.array([[3, 9, 10, 11, 30, 62, 63, -1]], np.int32)
    pages = jnp.asarray(keys.reshape(4, 16, 1, 4)[[2, 0, 3, 1]], jnp.float32)
    pages = jnp.concatenate([pages, jnp.full((1, 16, 1, 4), jnp.nan)])
    table = np.array([[1, 3, 0, 2]], np.int32)
    chosen = np.asarray(
        choose_tokens(
            *(jnp.asarray(each, jnp.float32) for each in (queries, weights)),
            pages,
            BlockPlaces(jnp.asarray(table), jnp.asarray(positions)),
            top_k=10,
        )
    )
    for query, position in enumerate(positions[0]):
        products = np.maximum(queries[0, query] @ keys[: position + 1].T, 0)
        np.testing.assert_array_equal(chosen[0, query], expected(weights[0, query] @ products, 10))


def test_nan_counts_as_infinite_and_minus_infinity_is_a_score():
    """Ties choose the lower position; minus infinity ranks after all numbers and before unseen keys."""
    inf, nan = np.inf, np.nan
    keys = np.array([0, 1, nan, 3, -1, inf, 2, nan, inf, inf, 4, 0, inf, 1, 2, nan], np.float32)
    weights, positions = np.array([1, -1, 1, -1], np.float32), np.array([[14, 14, 6, 12]], np.int32)
    places = BlockPlaces(jnp.asarray([[0]]), jnp.asarray(positions))
    chosen = choose_tokens(
        jnp.ones((1, 4, 1, 1)),
        jnp.asarray(weights.reshape(1, 4, 1)),
        jnp.asarray(keys.reshape(1, 16, 1, 1)),
        places,
        top_k=6,
    )
    for found, weight, position in zip(np.asarray(chosen[0]), weights, positions[0], strict=True):
        scores = weight * np.maximum(keys[: position + 1], 0)
        np.testing.assert_array_equal(found, expected(np.where(np.isnan(scores), inf, scores), 6))


def test_a_context_within_the_choice_is_seen_whole():
    pages = jnp.full((2, 16, 1, 4), jnp.nan)
    places = BlockPlaces(jnp.asarray([[0, 1]]), jnp.asarray([[0, 9, -1]]))
    chosen = choose_tokens(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2)), pages, places, top_k=10)
    np.testing.assert_array_equal(chosen[0], [[0] + [-1] * 9, range(10), [-1] * 10])


class Found(NamedTuple):
    """Return the results of a sequence that is computed chunk by chunk."""

    chosen_TK: np.ndarray
    outputs_TD: np.ndarray


@cache
def weights_of(kernels: str) -> dict[str, jax.Array]:
    generator, layers = np.random.default_rng(11), MODEL.num_layers
    shapes = {
        "index_q_LRi": (layers, MODEL.q_lora, HEADS * WIDTH),
        "index_k_LDd": (layers, MODEL.hidden, WIDTH),
        "index_k_norm_Ld": (layers, WIDTH),
        "index_k_norm_bias_Ld": (layers, WIDTH),
        "index_weights_LDA": (layers, MODEL.hidden, HEADS),
    }
    drawn_anew = {name: generator.standard_normal(shape) * 0.3 for name, shape in shapes.items()}
    layouts, found = KERNELS[kernels].parameters.layouts, {}
    for name, array in {**MODEL.weights(), **drawn_anew}.items():
        dtype = jnp.float32 if name == "index_weights_LDA" else KERNELS_OF[kernels]
        narrow = jnp.asarray(jnp.asarray(array, jnp.bfloat16), dtype)
        found[name] = jnp.asarray(LAYOUTS[layouts.get(name, "")](np.asarray(narrow)))
    return found


@cache
def compiled(kernels: str, top_k: int):
    config = LatentConfig(MODEL.nope, MODEL.norm_eps, MODEL.scale, MODEL.interleaved)
    index = IndexConfig(HEADS, top_k, MODEL.norm_eps, 1e-6, interleaved_rotation=True)
    frequencies = (THETA ** (-np.arange(0, MODEL.rope, 2) / MODEL.rope)).astype(np.float32)
    attention = SPARSE_ATTENTION[kernels][0].run

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pools: tuple[jax.Array, ...], batch: TokenBatch):
        inputs = AttentionInputs(weights, batch, rotation_of(batch.positions_T, frequencies), jnp.int32(LAYER))
        chosen, keys = attention.choose_tokens(hidden, pools[1], inputs, config=index)
        out, latents = attention.attend(hidden, pools[0], inputs._replace(chosen_TK=chosen), config=config)
        dense, _ = attention.attend(hidden, pools[0], inputs, config=config)
        return chosen, out, dense, (latents, keys)

    return jax.jit(layer)


def run(kernels: str, chunks: Chunks, *, top_k: int = TOP_K) -> tuple[Found, np.ndarray]:
    """Return the choice and the outputs of a sequence, and dense outputs; unwritten rows are NaN."""
    dtype, hidden = KERNELS_OF[kernels], drawn(MODEL)
    rows = MODEL.num_layers * NUM_PAGES
    widths = MODEL.kv_lora + MODEL.rope, WIDTH
    pools = tuple(jnp.full((rows, PAGE, 1, width), jnp.nan, dtype) for width in widths)
    chosen, outputs, dense, first = [], [], [], 0
    for count in chunks:
        batch, places = batch_of(first, count)
        padded = np.zeros((len(batch.positions_T), MODEL.hidden), np.float32)
        padded[places] = hidden[first : first + count]
        of_chunk = compiled(kernels, top_k)(jnp.asarray(padded, dtype), weights_of(kernels), pools, batch)
        *parts, pools = of_chunk
        for found, part in zip((chosen, outputs, dense), parts, strict=True):
            found.append(np.asarray(part)[places])
        first += count
    return Found(np.concatenate(chosen), np.concatenate(outputs)), np.concatenate(dense)


@pytest.fixture(params=KERNELS_OF)
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native":
        need_native_kernels()
    return request.param


def test_a_token_chooses_the_same_however_its_prompt_is_cut(kernels: str):
    """By native kernels its output has the same bits, too."""
    (whole, _), *others = (run(kernels, chunks) for chunks in CUTS.values())
    counts = np.minimum(np.arange(LENGTH) + 1, TOP_K)
    np.testing.assert_array_equal((whole.chosen_TK >= 0).sum(1), counts)
    assert (whole.chosen_TK <= np.arange(LENGTH)[:, None]).all()
    assert len({tuple(row) for row in whole.chosen_TK[TOP_K:]}) == LENGTH - TOP_K
    for found, _ in others:
        np.testing.assert_array_equal(found.chosen_TK, whole.chosen_TK)
        if kernels == "cpu_native":
            np.testing.assert_array_equal(found.outputs_TD, whole.outputs_TD)
        else:
            np.testing.assert_allclose(found.outputs_TD, whole.outputs_TD, rtol=0, atol=1e-5)


def test_contexts_within_the_choice_have_the_bits_of_dense_attention(kernels: str):
    """The first tokens see all; of the others none has the output of dense attention."""
    found, dense = run(kernels, CUTS["chunks that end within blocks and pages"])
    np.testing.assert_array_equal(found.outputs_TD[:TOP_K], dense[:TOP_K])
    assert (found.outputs_TD[TOP_K:] != dense[TOP_K:]).any(axis=1).all()
    whole, dense = run(kernels, CUTS["a prompt, then decoding"], top_k=LENGTH)
    np.testing.assert_array_equal(whole.outputs_TD, dense)


def test_native_kernels_choose_by_the_scores_of_the_definition():
    """In bfloat16 both round queries and keys alike: where the choices differ, a few scores are nearly equal."""
    need_native_kernels()
    (native, _), (exact, _) = (run(kernels, [LENGTH]) for kernels in ("cpu_native", "cpu"))
    common = [len({*a} & {*b}) for a, b in zip(native.chosen_TK, exact.chosen_TK, strict=True)]
    assert np.mean(np.array(common[TOP_K:]) / TOP_K) > 0.95
    scale = np.sqrt(np.mean(exact.outputs_TD**2))
    assert np.median(np.abs(native.outputs_TD - exact.outputs_TD)) < 0.03 * scale


NAN_KEYS = {"fewer than are chosen": (3, 17, 18, 60), "more": tuple(range(5, 5 + 2 * TOP_K, 2))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("places", NAN_KEYS.values(), ids=NAN_KEYS.keys())
@pytest.mark.parametrize("is_narrow", [False, True], ids=["plain", "fp8"])
def test_keys_that_are_nan_are_chosen_by_every_table(kernels: str, places: tuple[int, ...], is_narrow: bool):
    """Without these keys the choice would hide that a token is not finite; tokens that see it are not finite either."""
    dtype = BITS_OF_FP8[kernels] if is_narrow else KERNELS_OF[kernels]
    zeros = jnp.zeros((MODEL.num_layers * NUM_PAGES, PAGE, 1, WIDTH), KERNELS_OF[kernels]).astype(dtype)
    _, pool = chosen_over(kernels, zeros, first=0, count=LENGTH - 1)
    rows = LAYER * NUM_PAGES * PAGE + PAGES[np.array(places) // PAGE] * PAGE + np.array(places) % PAGE
    nan = np.uint8(0x7F) if dtype == jnp.uint8 else jnp.nan
    pool = pool.reshape(-1, WIDTH).at[rows].set(nan).reshape(pool.shape)
    (chosen,), _ = chosen_over(kernels, pool, first=LENGTH - 1, count=1)
    assert (chosen >= 0).all() and {*places[:TOP_K]} <= {*chosen.tolist()}


BITS_OF_FP8 = {"cpu": jnp.uint8, "cpu_native": jnp.float8_e4m3fn}
"""Dtypes of pools with keys of 8 bits, by table (`kv_pool.BITS`)."""


def chosen_over(kernels: str, pool: jax.Array, *, first: int, count: int) -> tuple[np.ndarray, jax.Array]:
    """The choice of `count` tokens from position `first` on over a pool of keys, and the pool after them."""
    attention, hidden, dtype = SPARSE_ATTENTION[kernels][0].run, drawn(MODEL), KERNELS_OF[kernels]
    index = IndexConfig(HEADS, TOP_K, MODEL.norm_eps, 1e-6, interleaved_rotation=True)
    frequencies = (THETA ** (-np.arange(0, MODEL.rope, 2) / MODEL.rope)).astype(np.float32)
    batch, places = batch_of(first, count)
    padded = np.zeros((len(batch.positions_T), MODEL.hidden), np.float32)
    padded[places] = hidden[first : first + count]
    rotation = rotation_of(batch.positions_T, frequencies)
    inputs = AttentionInputs(weights_of(kernels), batch, rotation, jnp.int32(LAYER))
    chosen, pool = jax.jit(partial(attention.choose_tokens, config=index))(jnp.asarray(padded, dtype), pool, inputs)
    return np.asarray(chosen)[places], pool


@pytest.mark.parametrize("kernels", BITS_OF_FP8, indirect=True)
def test_keys_of_8_bits_are_rounded_once_and_chosen_by_as_such(kernels: str):
    """A pool of plain keys that hold the rounded numbers gives the same choice, but for a token's own key, which is not
    rounded there."""
    shape, dtype = (MODEL.num_layers * NUM_PAGES, PAGE, 1, WIDTH), KERNELS_OF[kernels]
    zeros = jnp.zeros(shape, dtype)
    _, plain = chosen_over(kernels, zeros, first=0, count=LENGTH - 1)
    _, narrow = chosen_over(kernels, zeros.astype(BITS_OF_FP8[kernels]), first=0, count=LENGTH - 1)
    rounded = jnp.clip(plain.astype(jnp.float32), -448, 448).astype(jnp.float8_e4m3fn)
    written = np.asarray(rounded).view(np.uint8)[1:].reshape(-1)  # page 0 has padding
    np.testing.assert_array_equal(np.asarray(narrow).view(np.uint8)[1:].reshape(-1), written)
    assert len(np.unique(written)) > 100
    ours, _ = chosen_over(kernels, narrow, first=LENGTH - 1, count=1)
    theirs, _ = chosen_over(kernels, rounded.astype(dtype), first=LENGTH - 1, count=1)
    unrounded, _ = chosen_over(kernels, plain, first=LENGTH - 1, count=1)
    assert len({*ours[0]} ^ {*theirs[0]}) <= 2 and len({*ours[0]} ^ {*theirs[0]} - {LENGTH - 1}) <= 1
    assert len({*ours[0]} & {*unrounded[0]}) > 0.8 * TOP_K
    (whole, cut) = (
        [*chosen_over(kernels, zeros.astype(BITS_OF_FP8[kernels]), first=0, count=LENGTH)[0]],
        [
            *chosen_over(kernels, zeros.astype(BITS_OF_FP8[kernels]), first=0, count=LENGTH - 1)[0],
            *ours,
        ],
    )
    np.testing.assert_array_equal(whole, cut)
