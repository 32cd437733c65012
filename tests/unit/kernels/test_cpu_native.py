"""The native CPU kernels compute what the pure JAX path computes, each row by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.decoding.truncation import Limits, is_kept, keep_all, last_kept
from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.cpu_native.layout import INVERSES, LAYOUTS, pack, pack_columns, take_columns
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
)
from rayserve_moe.kernels.reference.layers import NO_ID, gumbel_noise, masses_of, rms_norm, rotation_of
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.spec import RopeSpec
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from tests.support.kernels.native_kernels import laid_out, need_native_kernels
from tests.support.session.hypothesis_examples import examples

TOKENS = st.integers(1, 40)
FREQUENCIES = rope_frequencies(RopeSpec(theta=1e6), 64)
FEW_COUNTS = st.sampled_from([1, 3, 37])
"""Counts of tokens where each is compiled anew by XLA, for what is compared with."""


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


def draw(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(generator.standard_normal(shape) * scale, jnp.bfloat16)


def wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float64)


@given(
    TOKENS, st.integers(1, 48), st.one_of(st.sampled_from([1, 16, 32, 96]), st.integers(1, 100)), st.integers(0, 2**16)
)
@examples(12)
def test_a_product_is_the_product(num_tokens, half_depth, width, number):
    generator = np.random.default_rng(number)
    left, right = draw(generator, num_tokens, 2 * half_depth), draw(generator, 2 * half_depth, width)
    found = np.asarray(calls.product(left, laid_out(right)))
    # Products of bfloat16 are exact in float32; a chain of K sums rounds by no more than K half steps of its bound.
    bound = 2 * half_depth * 2.0**-23 * (np.abs(wide(left)) @ np.abs(wide(right)))
    assert (np.abs(found - wide(left) @ wide(right)) <= bound).all()


@given(TOKENS, st.sampled_from([2, 30, 32, 34, 96]), st.integers(0, 2**16))
@examples(20)
def test_a_row_of_a_product_is_its_own(num_tokens, depth, number):
    generator = np.random.default_rng(number)
    left, right = draw(generator, num_tokens, depth), laid_out(draw(generator, depth, 64))
    together = np.asarray(calls.product(left, right))
    row = int(generator.integers(num_tokens))
    np.testing.assert_array_equal(together[row], np.asarray(calls.product(left[row : row + 1], right))[0])
    poisoned = left.at[(row + 1) % num_tokens].set(jnp.nan)
    if num_tokens > 1:
        np.testing.assert_array_equal(together[row], np.asarray(calls.product(poisoned, right))[row])


def test_packed_tables_give_back_their_rows():
    table = draw(np.random.default_rng(0), 96, 32)
    ids = jnp.asarray([0, 95, 31, 32, 5, 5])
    np.testing.assert_array_equal(take_columns(pack_columns(table), ids), table[ids])
    hidden = draw(np.random.default_rng(1), 3, 32)
    found = calls.product(hidden, pack_columns(table).reshape(32, 96))
    np.testing.assert_array_equal(found, calls.product(hidden, pack(table.T)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(40, 200), (1, 8), (7, 32)])
def test_norms_and_scores_are_those_of_jax_row_by_row(num_tokens, num_experts):
    generator = np.random.default_rng(num_tokens)
    rows, scale = draw(generator, num_tokens, 96), draw(generator, 96)
    router = jnp.asarray(generator.standard_normal((96, num_experts)), jnp.float32)
    normed, scores = calls.rms_norm(rows, scale, 1e-6), calls.router_scores(rows, router)
    np.testing.assert_allclose(wide(normed), wide(rms_norm(rows, scale, 1e-6)), rtol=2**-7)
    expected = jax.nn.softmax(jnp.matmul(rows.astype(jnp.float32), router, precision="highest"), axis=-1)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-7)
    row = num_tokens // 2
    np.testing.assert_array_equal(calls.rms_norm(rows[row:][:1], scale, 1e-6)[0], normed[row])
    np.testing.assert_array_equal(calls.router_scores(rows[row:][:1], router)[0], scores[row])
    poisoned = calls.router_scores(rows.at[row, 3].set(jnp.nan), router)
    assert np.isnan(poisoned[row]).all() and np.isfinite(np.delete(poisoned, row, axis=0)).all()


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 96), (40, 90)])
def test_a_sum_and_its_norm_at_once_are_those_made_one_after_the_other(num_tokens, width):
    generator = np.random.default_rng(num_tokens)
    rows, added, scales = (draw(generator, *size, width) for size in ((num_tokens,), (num_tokens,), (3,)))
    total, normed = jax.jit(partial(calls.add_and_norm, eps=1e-6))(rows, added, scales, layer=1)
    np.testing.assert_array_equal(total, rows + added)
    np.testing.assert_array_equal(normed, calls.rms_norm(rows + added, scales[1], 1e-6))


def test_float32_scales_of_a_norm_are_not_rounded():
    generator = np.random.default_rng(0)
    rows, added = draw(generator, 9, 90), draw(generator, 9, 90)
    scales = jnp.asarray(1 + generator.standard_normal((3, 90)) * 2**-10, jnp.float32)
    normed = calls.rms_norm(rows, scales[1], 1e-6)
    assert (wide(normed) != wide(calls.rms_norm(rows, scales[1].astype(jnp.bfloat16), 1e-6))).any()
    np.testing.assert_allclose(wide(normed), wide(rms_norm(rows, scales[1], 1e-6)), rtol=2**-8)
    _, summed = jax.jit(partial(calls.add_and_norm, eps=1e-6))(rows, added, scales, layer=1)
    np.testing.assert_array_equal(summed, calls.rms_norm(rows + added, scales[1], 1e-6))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a norm has other widths"):
        jax.block_until_ready(calls.rms_norm(rows, jnp.ones(90, jnp.int32), 1e-6))


def test_a_norm_by_the_scales_of_no_layer_is_refused():
    rows = jnp.ones((2, 32), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no scales of this layer"):
        jax.block_until_ready(calls.add_and_norm(rows, rows, rows, layer=2, eps=1e-6))


def test_angles_are_those_of_jax_position_by_position():
    positions = jnp.asarray([-1, 0, 1, 127, 4095, 40_000], jnp.int32)
    expected = rotation_of(positions, FREQUENCIES)
    found = calls.rotation_of(positions, FREQUENCIES)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)
    alone = calls.rotation_of(positions[3:4], FREQUENCIES)
    np.testing.assert_array_equal(alone[1][0], found[1][3])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1000, 1, 16, 2051])
def test_masses_are_those_of_jax_whatever_other_rows_there_are(size):
    generator = np.random.default_rng(size)
    logits = jnp.asarray(4 * generator.standard_normal((9, size)), jnp.float32).at[5].set(jnp.nan)
    logits = logits.at[3, size // 2].set(jnp.inf).at[4, size - 1].set(-jnp.inf).at[6].set(jnp.round(logits[6]))
    temperature = jnp.asarray(generator.uniform(0.1, 2, 9), jnp.float32)
    for num_words in {size, size - 1}:
        found = calls.masses_of(logits, temperature, jnp.int32(num_words))
        expected = masses_of(logits, temperature, jnp.int32(num_words))
        fine = np.array([0, 1, 2, 4, 6, 7, 8])
        np.testing.assert_allclose(found.mass_S[fine], expected.mass_S[fine], rtol=2e-6, atol=1e-37)
        np.testing.assert_array_equal(found.finite_S, expected.finite_S)
        for ours, theirs in ((found.best_S, expected.best_S), (found.place_S, expected.place_S)):
            np.testing.assert_array_equal(ours[fine], theirs[fine])
        for count in (1, 2, 4):
            few = calls.masses_of(logits[-count:], temperature[-count:], jnp.int32(num_words))
            for ours, theirs in zip(few, found, strict=True):
                np.testing.assert_array_equal(ours, theirs[-count:])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("size", [1, 16, 1000, 20_011])
def test_the_chosen_word_is_the_best_of_those_kept_with_its_noise(size, spread):
    generator = np.random.default_rng(size)
    logits = spread * generator.standard_normal((40, size)) * (generator.random((40, size)) < 0.5)
    logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=1)
    of_noise = tuple(jnp.asarray(generator.integers(0, 2**32, 40, np.uint32)) for _ in range(3))
    first, part = 7, VocabularyPart(size + 7, size + 7)
    whole = jnp.pad(logprobs, ((0, 0), (first, 0)), constant_values=-jnp.inf)
    top_k = jnp.asarray(generator.integers(0, 5, 40), jnp.uint32)
    last = last_kept(whole, Limits(top_k, jnp.full(40, 0.9), jnp.zeros(40)), part=part)
    for kept in (keep_all(40), last):
        scores = whole + calls.gumbel_noise(*of_noise, first=jnp.int32(0), size=size + first)
        scores = jnp.where(is_kept(whole, kept, part=part), scores, -jnp.inf)
        ids = jnp.argmax(scores, axis=1)
        places = {"first": jnp.int32(first), "num_places": size + first}
        found = calls.choose(logprobs, logprobs.max(axis=1), of_noise, kept, **places)
        rows = np.arange(40)
        for ours, theirs in zip(found, (scores[rows, ids], ids, whole[rows, ids]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_no_word_is_chosen_of_a_part_that_cannot_have_it():
    """Another part has the likeliest, by more than noise can make up for."""
    words = jnp.zeros(2, jnp.uint32)
    places = {"first": jnp.int32(0), "num_places": 64}
    found = calls.choose(jnp.full((2, 32), -21.0), jnp.zeros(2), (words, words, words), keep_all(2), **places)
    for values, value in zip(found, (-np.inf, NO_ID, 0.0), strict=True):
        np.testing.assert_array_equal(values, [value] * 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1000, 1, 16, 2051])
def test_noise_is_that_of_jax_row_by_row(size):
    generator = np.random.default_rng(size)
    numbers = [jnp.asarray(generator.integers(0, 2**32, 5, np.uint32)) for _ in range(3)]
    none = jnp.int32(0)
    found = np.asarray(calls.gumbel_noise(*numbers, first=none, size=size))
    np.testing.assert_allclose(found, gumbel_noise(*numbers, first=none, size=size), rtol=2e-6, atol=3e-7)
    alone = calls.gumbel_noise(*(words[3:4] for words in numbers), first=none, size=size)
    np.testing.assert_array_equal(alone[0], found[3])
    for first in {0, size // 3, size - 1}:
        part = calls.gumbel_noise(*numbers, first=jnp.int32(first), size=size - first)
        np.testing.assert_array_equal(part, found[:, first:])


def expert_case(generator: np.random.Generator, num_tokens: int, top_k: int, num_slots: int):
    width, inner, num_layers = 64, 96, 2
    shapes = [(width, inner), (width, inner), (inner, width)]
    weights = ExpertWeights(*(draw(generator, num_layers * num_slots, *shape, scale=0.2) for shape in shapes))
    slots = np.stack([generator.permutation(num_slots + 2)[:top_k] for _ in range(num_tokens)])
    gates = generator.random((num_tokens, top_k)).astype(np.float32)
    return draw(generator, num_tokens, width), jnp.asarray(np.minimum(slots, num_slots), jnp.int32), gates, weights


@given(FEW_COUNTS, st.sampled_from([(1, 1), (4, 9)]), st.integers(0, 2**16))
@examples(6)
def test_expert_sums_are_those_of_the_blocks(num_tokens, sizes, number):
    (top_k, num_slots), generator = sizes, np.random.default_rng(number)
    hidden, slots, gates, weights = expert_case(generator, num_tokens, top_k, num_slots)
    config = ProductConfig(num_slots, num_tokens * top_k / num_slots)
    picked = multiply_in_blocks(hidden, slots, LayerExperts(weights, num_slots, config))
    here = np.asarray(slots) < num_slots
    expected = np.einsum("TK,TKD->TD", np.where(here, gates, 0), np.where(here[..., None], wide(picked), 0))
    packed = LayerExperts(ExpertWeights(*map(laid_out, weights[:3])), num_slots, config)
    found = calls.expert_sums(hidden, slots, gates, packed)
    # Both round 96 inner numbers and the result to 8 bits, by chance to different sides: a few steps of the largest.
    np.testing.assert_allclose(found, expected, atol=2**-6 * max(1.0, np.abs(expected).max()))
    native = calls.expert_results(hidden, slots, packed)
    np.testing.assert_allclose(
        wide(native)[here], wide(picked)[here], atol=2**-6 * max(1.0, np.abs(wide(picked)[here]).max(initial=0.0))
    )


def test_the_sum_of_a_token_is_its_own():
    generator = np.random.default_rng(3)
    hidden, slots, gates, weights = expert_case(generator, 37, 4, 9)
    packed = LayerExperts(ExpertWeights(*map(laid_out, weights[:3])), 9, ProductConfig(9, 1.0))

    def sums(places: np.ndarray, hidden: jax.Array = hidden) -> np.ndarray:
        return np.asarray(calls.expert_sums(hidden[places], slots[places], gates[places], packed))

    together = sums(np.arange(37))
    for places in (np.array([5]), np.array([36, 5, 7]), np.arange(36, -1, -1)):
        np.testing.assert_array_equal(sums(places), together[places])
    poisoned = sums(np.arange(37), hidden.at[7].set(jnp.nan))
    others = np.arange(37) != 7
    np.testing.assert_array_equal(poisoned[others], together[others])


def test_assignments_of_other_devices_add_nothing():
    hidden, slots, gates, weights = expert_case(np.random.default_rng(4), 5, 2, 3)
    elsewhere = jnp.full_like(slots, 3)
    packed = LayerExperts(ExpertWeights(*map(laid_out, weights[:3])), 0, ProductConfig(3, 1.0))
    assert not np.asarray(calls.expert_sums(hidden, elsewhere, gates, packed)).any()


def test_depths_without_pairs_are_refused():
    with pytest.raises(Exception, match="must divide by 2"):
        jax.block_until_ready(calls.product(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 32), jnp.bfloat16)))


@pytest.mark.parametrize("first_slot", [-1, 4])
def test_slots_beyond_the_weights_are_refused(first_slot):
    hidden, slots, gates, weights = expert_case(np.random.default_rng(5), 2, 1, 3)
    with pytest.raises(Exception, match="no such expert slots"):
        jax.block_until_ready(
            calls.expert_sums(hidden, slots, gates, LayerExperts(weights, first_slot, ProductConfig(3, 1.0)))
        )


ROWS, VECTOR = jnp.ones((2, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
WORDS = jnp.zeros(2, jnp.uint32)
NUMBERS, SLOTS = jnp.ones((2, 64)), jnp.zeros((2, 1), jnp.int32)
EXPERT, OUT = jnp.ones((1, 64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64), jnp.float32)
MATRICES = EXPERT, EXPERT, EXPERT.reshape(1, 32, 64)
BIASES = EXPERT[:, 0], EXPERT[:, 1], EXPERT[:, :2].reshape(1, 64)
INTEGERS = tuple(matrix.astype(jnp.int8) for matrix in MATRICES)
E4M3 = tuple(matrix.astype(jnp.float8_e4m3fn) for matrix in MATRICES)
SCALES = tuple(bias.astype(jnp.float32)[:, None] for bias in BIASES)
BLOCKS = tuple(jnp.tile(scale, (1, 8, 1)) for scale in SCALES)
NO_SCALES = (NUMBERS[0, :0],) * 3
OF_EXPERTS = {"num_slots": np.int64(1), "activation": "silu", "slope": np.float32(1), "limit": np.float32(1)}
ATTRIBUTES = {
    "norm": {"eps": np.float32(1e-6)},
    "experts": OF_EXPERTS,
    "int8experts": OF_EXPERTS,
    "fp8experts": OF_EXPERTS,
    "scores": {"score": "softmax"},
    "rotation": {"factor": np.float32(1)},
    "choose": {"last_place": np.int64(15)},
}
MASSES = tuple(jax.ShapeDtypeStruct((2,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.int32))
CHOSEN = tuple(jax.ShapeDtypeStruct((2,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32))


@pytest.mark.parametrize(
    ("kernel", "arguments", "out"),
    [
        ("product", (ROWS, ROWS), OUT),
        ("product", (ROWS, VECTOR), OUT),
        ("product", (ROWS, jnp.ones((64, 32), jnp.bfloat16)), OUT),
        ("scores", (ROWS, NUMBERS, NUMBERS[0, :0]), OUT),
        ("scores", (ROWS, NUMBERS.T, NUMBERS[0, :3]), jax.ShapeDtypeStruct((2, 2), jnp.float32)),
        ("norm", (ROWS, VECTOR[:32]), jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)),
        ("norm", (VECTOR, VECTOR), jax.ShapeDtypeStruct((64,), jnp.bfloat16)),
        ("rotation", (SLOTS[:, 0], NUMBERS[0, :8]), (OUT, OUT)),
        ("masses", (NUMBERS, NUMBERS[0], jnp.int32(0)), MASSES),
        ("masses", (NUMBERS, NUMBERS[:, 0], jnp.int32(0)), (*MASSES[:3], jax.ShapeDtypeStruct((1,), jnp.int32))),
        ("masses", (NUMBERS[0], NUMBERS[:, 0], jnp.int32(0)), MASSES),
        ("masses", (NUMBERS, NUMBERS[:, 0], SLOTS[:, 0]), MASSES),
        ("choose", (NUMBERS, NUMBERS[:, 0], *(WORDS[:1],) * 3, SLOTS[:, 0], SLOTS[:, 0], jnp.int32(0)), CHOSEN),
        ("choose", (NUMBERS[0], NUMBERS[:, 0], *(WORDS,) * 3, SLOTS[:, 0], SLOTS[:, 0], jnp.int32(0)), CHOSEN),
        ("choose", (NUMBERS, NUMBERS[:, 0], *(WORDS,) * 3, SLOTS[:, 0], SLOTS[:, 0], SLOTS[:, 0]), CHOSEN),
        ("noise", (WORDS, WORDS, WORDS[:1], jnp.int32(0)), OUT),
        ("noise", (WORDS[:1], WORDS[:1], WORDS[:1], jnp.int32(0)), OUT),
        ("noise", (WORDS, WORDS, WORDS, jnp.zeros(1, jnp.int32)), OUT),
        ("experts", (ROWS, SLOTS, NUMBERS, *MATRICES, *BIASES, *NO_SCALES, jnp.int32(0)), OUT),
        ("experts", (ROWS, SLOTS, NUMBERS[:, :1], EXPERT, EXPERT, EXPERT, *BIASES, *NO_SCALES, jnp.int32(0)), OUT),
        ("experts", (ROWS, SLOTS[:1], NUMBERS[:, :1], *MATRICES, *BIASES, *NO_SCALES, jnp.int32(0)), OUT),
        ("experts", (ROWS, SLOTS, NUMBERS[:, :1], *MATRICES, *BIASES, *SCALES, jnp.int32(0)), OUT),
        ("int8experts", (ROWS, SLOTS, NUMBERS[:, :1], *INTEGERS, *BIASES, *NO_SCALES, jnp.int32(0)), OUT),
        ("int8experts", (ROWS, SLOTS, NUMBERS[:, :1], *INTEGERS, *BIASES, *SCALES[::-1], jnp.int32(0)), OUT),
        ("fp8experts", (ROWS, SLOTS, NUMBERS[:, :1], *E4M3, *BIASES, *NO_SCALES, jnp.int32(0)), OUT),
        ("fp8experts", (ROWS, SLOTS, NUMBERS[:, :1], *INTEGERS, *BIASES, *SCALES, jnp.int32(0)), OUT),
        ("fp8experts", (ROWS, SLOTS, NUMBERS[:, :1], *E4M3, *BIASES, BLOCKS[0], *SCALES[1:], jnp.int32(0)), OUT),
        ("fp8experts", (ROWS, SLOTS, NUMBERS[:, :1], *E4M3, *BIASES, *(b[:, :0] for b in BLOCKS), jnp.int32(0)), OUT),
        *(
            ("experts", (ROWS, SLOTS, NUMBERS[:, :1], *MATRICES, *biases, *NO_SCALES, jnp.int32(0)), OUT)
            for biases in permutations(BIASES)
            if biases[2] is not BIASES[2]
        ),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(kernel, arguments, out):
    attributes = ATTRIBUTES.get(kernel, {})
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        jax.block_until_ready(jax.ffi.ffi_call(f"{calls.PREFIX}{kernel}", out)(*arguments, **attributes))


@pytest.mark.parametrize(
    ("kernel", "matrices", "scales"),
    [
        ("experts", MATRICES, NO_SCALES),
        ("int8experts", INTEGERS, SCALES),
        ("fp8experts", E4M3, SCALES),
        ("fp8experts", E4M3, BLOCKS),
    ],
)
def test_arrays_that_fit_each_other_are_taken(kernel, matrices, scales):
    arguments = (ROWS, SLOTS, NUMBERS[:, :1], *matrices, *BIASES, *scales, jnp.int32(0))
    call = jax.ffi.ffi_call(f"{calls.PREFIX}{kernel}", OUT)
    assert np.isfinite(call(*arguments, **ATTRIBUTES[kernel])).all()


def test_no_item_is_lost_or_done_twice_when_calls_follow_each_other():
    """Calls of few and of many items in turn, with more threads that compute than there are cores."""
    generator = np.random.default_rng(6)
    left = draw(generator, 1, 2)
    rights = [laid_out(draw(generator, 2, size)) for size in (64, 4096, 96, 1024)]
    multiply = jax.jit(calls.product)
    expected = [np.asarray(multiply(left, right)) for right in rights]

    def run(_: int) -> bool:
        return all(
            np.array_equal(multiply(left, right), out)
            for _ in range(40)
            for right, out in zip(rights, expected, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@pytest.mark.parametrize("shape", [(96, 64), (2, 3, 32, 40), (6, 20)])
@pytest.mark.parametrize("dtype", [np.uint16, np.int8])
def test_layouts_can_be_undone(shape, dtype):
    values = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    for name, layout in LAYOUTS.items():
        np.testing.assert_array_equal(INVERSES[name](layout(values)), values)
