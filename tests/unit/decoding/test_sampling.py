"""Sampling follows its distribution, is a function of (seed, choice, position) alone, and says what it cannot do."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.log_probs import LOWEST_LOGPROB
from rayserve_moe.decoding.sampling import Sampled, SamplingBatch, sample
from rayserve_moe.decoding.truncation import Limits
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from tests.support.engine.sampling_reference import log_softmax

VOCABULARY = 24


def sample_from_whole(logits: jax.Array, batch: SamplingBatch, *, max_top: int = 5) -> Sampled:
    return sample(logits, batch, part=VocabularyPart(logits.shape[1], logits.shape[1]), max_top=max_top)


compiled = jax.jit(sample_from_whole)
ROWS = 64
"""Smaller batches are padded to this number of rows, so that they share a program."""


def compiled_sample(logits: jax.Array, batch: SamplingBatch) -> Sampled:
    """Sample a batch; few rows are followed by copies of the last one."""
    count = len(logits)
    num_copies = max(0, ROWS - count)

    def padded(values: jax.Array) -> np.ndarray:
        return np.concatenate([values, np.repeat(values[-1:], num_copies, axis=0)])

    found = compiled(*jax.tree.map(padded, (logits, batch)))
    return jax.tree.map(lambda values: np.asarray(values)[:count], found)


def rows(count: int, **fields: object) -> SamplingBatch:
    """Parameters of `count` rows; scalars hold for all."""
    defaults: dict = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "choice": 0, "position": 0}
    defaults["num_top"] = 0
    merged = defaults | fields
    kinds = dict.fromkeys(("temperature", "top_p", "min_p"), np.float32) | {"position": np.int32}
    arrays = {
        f"{name}_S": jnp.asarray(np.broadcast_to(np.asarray(value, kinds.get(name, np.uint32)), (count,)))
        for name, value in merged.items()
    }
    limits = Limits(*(arrays.pop(name) for name in Limits._fields))
    return SamplingBatch(limits=limits, **arrays)


def logits_of(count: int, seed: int = 0, size: int = VOCABULARY) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, size)) * 2).astype(np.float32)


def kept_by_definition(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after top-k, then top-p of what is left, then min-p against the likeliest; float64 [V]."""
    probs = np.exp(log_softmax(logits / temperature))
    order = np.argsort(-probs, kind="stable")
    if top_k:
        order = order[:top_k]
    share = probs[order] / probs[order].sum()
    order = order[: np.searchsorted(np.cumsum(share), top_p) + 1] if top_p < 1 else order
    order = order[probs[order] >= min_p * probs[order[0]]]
    kept = np.zeros_like(probs)
    kept[order] = probs[order] / probs[order].sum()
    return kept


TRUNCATIONS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 1000, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.7, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1e-6, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.6, "min_p": 0.0},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", TRUNCATIONS, ids=str)
def test_samples_follow_the_truncated_distribution(params):
    count, logits = 8000, logits_of(1, seed=3)[0]
    batch = rows(count, seed=np.arange(count), position=np.arange(count) % 7, **params)
    ids, _, finite, *_ = compiled_sample(jnp.asarray(np.tile(logits, (count, 1))), batch)
    expected = kept_by_definition(logits, **params)
    found = np.bincount(np.asarray(ids), minlength=VOCABULARY) / count
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected)), "a removed token was sampled"
    # Five standard deviations of a share that is measured with `count` draws.
    bound = 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9
    assert (np.abs(found - expected) <= bound).all()
    assert bool(finite.all())


def test_without_truncation_the_token_is_the_argmax_of_log_probability_and_noise():
    """Noise is of the token's seed, choice and position, whatever other rows ask for."""
    logits = logits_of(50, seed=9, size=300)
    seeds, choices, positions = np.arange(50) * 7919, np.arange(50) % 3, np.arange(50) % 11
    top_k = np.where(np.arange(50) % 2, 3, 0)
    found = compiled_sample(jnp.asarray(logits), rows(50, seed=seeds, choice=choices, position=positions, top_k=top_k))
    for row in range(0, 50, 2):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seeds[row]), choices[row]), positions[row])
        noise = np.asarray(jax.random.gumbel(key, (300,), jnp.float32))
        assert int(found.ids_S[row]) == int(np.argmax(log_softmax(logits[row]) + noise))


def test_min_p_of_one_keeps_every_likeliest_token():
    logits = logits_of(1)[0]
    logits[[3, 8, 19]] = 20.0
    ids, *_ = compiled_sample(jnp.asarray(np.tile(logits, (200, 1))), rows(200, min_p=1.0, seed=np.arange(200)))
    assert set(np.asarray(ids).tolist()) == {3, 8, 19}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_logprobs_are_of_the_logits_over_temperature_before_truncation(temperature):
    logits = logits_of(12)
    batch = rows(12, temperature=temperature, top_k=2, top_p=0.5, min_p=0.3, seed=np.arange(12))
    ids, logprobs, _, *_ = compiled_sample(jnp.asarray(logits), batch)
    expected = log_softmax(logits / (temperature or 1.0))
    np.testing.assert_allclose(logprobs, expected[np.arange(12), np.asarray(ids)], atol=2e-6)


def test_temperature_zero_takes_the_largest_logit_ties_to_the_smaller_id():
    logits = logits_of(3)
    logits[1, [4, 9, 20]] = 50.0
    ids, *_ = compiled_sample(jnp.asarray(logits), rows(3, temperature=0.0, seed=[1, 2, 3]))
    np.testing.assert_array_equal(ids, [logits[0].argmax(), 4, logits[2].argmax()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-4])
def test_a_tiny_temperature_is_nearly_greedy_and_its_logprob_finite(temperature):
    logits = logits_of(5) * 100
    ids, logprobs, finite, *_ = compiled_sample(
        jnp.asarray(logits), rows(5, temperature=temperature, seed=np.arange(5))
    )
    np.testing.assert_array_equal(ids, logits.argmax(-1))
    assert np.isfinite(logprobs).all() and bool(finite.all())


def test_a_token_depends_on_seed_choice_and_position_and_on_nothing_else():
    logits = np.tile(logits_of(1, seed=5, size=512), (4, 1)) * 0.1

    def draw(**fields: object) -> int:
        return int(compiled_sample(jnp.asarray(logits), rows(4, **fields))[0][0])

    one = {"seed": [7, 1, 2, 3], "choice": [2, 0, 0, 0], "position": [40, 0, 1, 2]}
    other_company = {"seed": [7, 9, 9, 9], "choice": [2, 5, 6, 7], "position": [40, 3, 3, 3]}
    mixed = one | {"temperature": [1.0, 0.0, 0.3, 2.0], "top_k": [0, 3, 1, 0], "top_p": [1.0, 0.2, 1.0, 0.5]}
    assert draw(**one) == draw(**other_company) == draw(**mixed)
    by_seed = {draw(**(one | {"seed": seed})) for seed in range(20)}
    by_choice = {draw(**(one | {"choice": choice})) for choice in range(20)}
    by_position = {draw(**(one | {"position": position})) for position in range(20)}
    assert min(len(by_seed), len(by_choice), len(by_position)) > 10


def test_neighbouring_seeds_choices_and_positions_are_independent():
    logits = np.zeros((64, 512), np.float32)
    drawn = [
        np.asarray(compiled_sample(jnp.asarray(logits), rows(64, **{name: np.arange(64)}))[0])
        for name in ("seed", "choice", "position")
    ]
    for ids in drawn:
        assert len(set(ids.tolist())) > 45, "64 uniform draws of 512 ids repeat a few at most"
    assert (drawn[0] == drawn[1]).sum() < 5 and (drawn[1] == drawn[2]).sum() < 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_logits_that_are_not_finite_are_named_and_spoil_no_other(bad, temperature):
    logits = logits_of(4)
    batch = rows(4, temperature=temperature, top_k=5, seed=np.arange(4))
    ids, logprobs, finite, *_ = compiled_sample(jnp.asarray(logits), batch)
    assert bool(finite.all())
    logits[2, 7] = bad
    ids_after, logprobs_after, finite_after, *_ = compiled_sample(jnp.asarray(logits), batch)
    np.testing.assert_array_equal(finite_after, [True, True, False, True])
    np.testing.assert_array_equal(np.delete(ids_after, 2), np.delete(ids, 2))
    np.testing.assert_array_equal(np.delete(logprobs_after, 2), np.delete(logprobs, 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_the_likeliest_tokens_fall_with_ties_to_the_smaller_id(most):
    """As many as any row wants."""
    logits = np.round(logits_of(3, seed=4), 0)
    found = compiled_sample(jnp.asarray(logits), rows(3, temperature=0.5, num_top=[0, most, 0], top_k=1))
    expected = log_softmax(logits / 0.5)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :most]
    np.testing.assert_array_equal(found.top.ids_SJ[:, :most], order)
    logprobs = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_allclose(found.top.logprobs_SJ[:, :most], logprobs, atol=1e-5)
    assert not found.top.ids_SJ[:, most:].any() and not found.top.logprobs_SJ[:, most:].any()


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_rank_counts_the_likelier_tokens_with_ties_to_the_smaller_id(temperature):
    logits = np.round(logits_of(40, seed=6), 0)
    found = compiled_sample(jnp.asarray(logits), rows(40, temperature=temperature, seed=np.arange(40)))
    order = np.argsort(-logits, axis=1, kind="stable")
    places = 1 + np.argmax(order == np.asarray(found.ids_S)[:, None], axis=1)
    np.testing.assert_array_equal(found.ranks_S, places)
    assert (len(set(places)) > 5) == (temperature > 0)


def test_a_greedy_row_has_rank_one_beside_rows_that_draw():
    found = compiled_sample(jnp.asarray(logits_of(40)), rows(40, temperature=[0, 3] * 20))
    np.testing.assert_array_equal(found.ranks_S[::2], 1)


def test_words_of_no_probability_come_last_each_once():
    logits = np.full((1, 5), -1e38, np.float32)
    logits[0, 3] = 1e38
    found = compiled_sample(jnp.asarray(logits), rows(1, temperature=0.25, num_top=5))
    np.testing.assert_array_equal(found.top.ids_SJ, [[3, 0, 1, 2, 4]])
    np.testing.assert_array_equal(found.top.logprobs_SJ[0, 1:], LOWEST_LOGPROB)


def test_a_vocabulary_may_be_smaller_than_what_is_told():
    logits = jnp.asarray(logits_of(2, size=3))
    found = jax.jit(partial(sample_from_whole, max_top=20))(logits, rows(2, num_top=3))
    assert found.top.ids_SJ.shape == (2, 3)
