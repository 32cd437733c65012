"""Truncation and sampling masks by native kernels keep the tokens that the reference keeps, whatever other rows do."""

# S sampled rows   V vocabulary

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.evidence import sampling_mask
from rayserve_moe.decoding.sampling import Kept
from rayserve_moe.decoding.truncation import LastKept, Limits, is_kept, keep_all, last_kept
from rayserve_moe.kernels.cpu_native import sampling_call
from rayserve_moe.kernels.reference.layers import masses_of
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from tests.support.kernels.native_kernels import need_native_kernels

ROWS = 48
SIZES = pytest.mark.parametrize("size", [1, 33, 1000, 20_011])
SPREADS = pytest.mark.parametrize("spread", [0.0, 1.0, 40.0])
last_of, are_kept = (jax.jit(function, static_argnames="part") for function in (last_kept, is_kept))
mask_of = partial(jax.jit(sampling_mask, static_argnames=("part", "masses", "kept_words")), masses=masses_of)


@pytest.fixture(autouse=True)
def _native_kernels() -> None:
    need_native_kernels()


def drawn(size: int, spread: float) -> tuple[jax.Array, Limits]:
    """Return log-probs, a half of which are tied, and limits of which each is absent in some rows."""
    generator = np.random.default_rng(size)
    logits = spread * generator.standard_normal((ROWS, size)) * (generator.random((ROWS, size)) < 0.5)
    logprobs_SV = jax.jit(jax.nn.log_softmax)(jnp.asarray(logits, jnp.float32))
    top_k = generator.choice([0, 1, 3, size // 2, size, size + 1, 2**31], ROWS)
    top_p, min_p = generator.choice([1.0, 0.9, 0.5, 1e-6, 0.999999], ROWS), generator.choice([0.0, 0.1, 1.0], ROWS)
    return logprobs_SV, Limits(
        jnp.asarray(top_k, jnp.uint32), jnp.asarray(top_p, jnp.float32), jnp.asarray(min_p, jnp.float32)
    )


@pytest.mark.sampled(5)
@SIZES
@SPREADS
def test_the_same_tokens_are_kept(size: int, spread: float) -> None:
    part, (logprobs_SV, limits) = VocabularyPart(size, size), drawn(size, spread)
    wanted = are_kept(logprobs_SV, last_of(logprobs_SV, limits, part=part), part=part)
    found = LastKept(*sampling_call.last_kept(logprobs_SV, *limits))
    np.testing.assert_array_equal(are_kept(logprobs_SV, found, part=part), wanted)
    alone = sampling_call.last_kept(logprobs_SV[7:8], *(each[7:8] for each in limits))
    assert [int(each[0]) for each in alone] == [int(each[7]) for each in found]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_change_no_other_row(value: float) -> None:
    logprobs_SV, limits = drawn(1000, 1.0)
    found = sampling_call.last_kept(logprobs_SV, *limits)
    changed = sampling_call.last_kept(logprobs_SV.at[5].set(value), *limits)
    for ours, theirs in zip(found, changed, strict=True):
        np.testing.assert_array_equal(np.delete(ours, 5), np.delete(theirs, 5))


@pytest.mark.sampled(5)
@SIZES
@SPREADS
def test_a_mask_has_the_kept_tokens_and_the_log_prob_among_them(size: int, spread: float) -> None:
    """The last words are padding; every fifth row is greedy, and every seventh keeps all tokens."""
    width = size + 31
    logprobs_SV, limits = drawn(size, spread)
    logprobs_SV = jnp.pad(logprobs_SV, ((0, 0), (0, width - size)), constant_values=-jnp.inf)
    part, ids_S = VocabularyPart(size, width), jnp.argmax(logprobs_SV, axis=1).astype(jnp.int32)
    temperature_S = jnp.where(jnp.arange(ROWS) % 5 == 0, 0.0, 0.7)
    keeps_all_S = jnp.arange(ROWS) % 7 == 0
    last = last_of(logprobs_SV, limits, part=part)
    last = LastKept(*(jnp.where(keeps_all_S, every, own) for every, own in zip(keep_all(ROWS), last, strict=True)))
    wants = jnp.ones(ROWS, bool)
    (bits, among), (wanted_bits, wanted) = (
        mask_of(
            Kept(logprobs_SV, last), ids_S, wants_S=wants, temperature_S=temperature_S, part=part, kept_words=kernel
        )
        for kernel in (sampling_call.kept_words, None)
    )
    np.testing.assert_array_equal(bits, wanted_bits)
    np.testing.assert_allclose(among, wanted, rtol=1e-5, atol=2e-6)
    alone = sampling_call.kept_words(
        logprobs_SV[9:10], [each[9:10] for each in last], ids_S[9:10], temperature_S=temperature_S[9:10], num_words=size
    )
    np.testing.assert_array_equal(alone[1][0], among[9])


def test_a_row_without_a_sample_has_an_empty_mask() -> None:
    """Logits that are not finite have no sample: its id may be any number."""
    logprobs_SV, _ = drawn(33, 1.0)
    ids_S = jnp.full(ROWS, 2**31 - 1, jnp.int32).at[0].set(-1)
    bits, among = sampling_call.kept_words(
        logprobs_SV, keep_all(ROWS), ids_S, temperature_S=jnp.ones(ROWS), num_words=33
    )
    assert not np.any(bits) and not np.any(among)
