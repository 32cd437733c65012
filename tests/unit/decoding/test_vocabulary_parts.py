"""What is drawn from a vocabulary that lies in parts on several devices is what is drawn from the whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.adjustment import PROMPT_MARK, AdjustmentState, Penalties, adjust, record_samples
from rayserve_moe.decoding.log_probs import log_prob_of, log_probs_of, ranks_of
from rayserve_moe.decoding.sampling import SamplingBatch, sample
from rayserve_moe.decoding.truncation import Limits
from rayserve_moe.kernels.reference.layers import gumbel_noise
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.vocabulary_part import VocabularyPart, vocabulary_part

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (8, 1)]
NUM_WORDS, NUM_ROWS, NUM_BIASES = 57, 64, 5
"""Eight parts have 8 words each, so the last is nothing but padding."""
NEUTRAL = {"top_p": 1.0, "min_p": 0.0, "top_k": 0}


@cache
def part_of(layout: tuple[int, int]) -> tuple[Any, VocabularyPart]:
    plan = plan_for(jax.devices()[: layout[0] * layout[1]], data_size=layout[0])
    return plan, vocabulary_part(plan, num_words=NUM_WORDS)


def run(layout: tuple[int, int], function: Any, *of_words: np.ndarray, whole: Any = ()) -> Any:
    """Call `function(part, *of_words, whole)` on every device of a mesh, with its words of arrays [rows, words].

    Returns what all devices return, one after the other.
    """
    plan, part = part_of(layout)
    padding = [(0, 0), (0, part.num_parts * part.width - NUM_WORDS)]
    padded = [np.pad(array, padding, constant_values=100) for array in of_words]

    def on_device(arrays: list[jax.Array], whole: Any) -> Any:
        return jax.tree.map(lambda found: found[None], function(part, *arrays, whole))

    parts = (plan.partition((None, "vocabulary")), jax.sharding.PartitionSpec())
    everywhere = jax.sharding.PartitionSpec(("tensor", "data"))
    mapped = jax.shard_map(on_device, mesh=plan.mesh, in_specs=parts, out_specs=everywhere, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(padded, whole))


def logits_with_ties(seed: int) -> np.ndarray:
    return np.round(np.random.default_rng(seed).standard_normal((NUM_ROWS, NUM_WORDS)) * 6).astype(np.float32) / 2


def batch(seed: int, *, truncated: bool, greedy: bool = False) -> SamplingBatch:
    random = np.random.default_rng((seed, 1))
    floats = {
        "temperature": random.choice([0.0, 0.3, 1.0, 4.0], NUM_ROWS) * (not greedy),
        "top_p": random.choice([0.2, 0.77, 1.0], NUM_ROWS),
        "min_p": random.choice([0.0, 0.03, 0.4], NUM_ROWS),
    }
    integers = {
        "top_k": random.choice([0, 1, 7, 1000], NUM_ROWS),
        "seed": random.integers(2**32, size=NUM_ROWS),
        "choice": random.integers(3, size=NUM_ROWS),
        "position": random.integers(4000, size=NUM_ROWS),
        "num_top": random.choice([0, 2, 20], NUM_ROWS),
    }
    arrays = {name: values.astype(np.float32) for name, values in floats.items()}
    arrays |= {name: values.astype(np.uint32) for name, values in integers.items()}
    for name, value in NEUTRAL.items():
        arrays[name] = arrays[name] if truncated else np.full_like(arrays[name], value)
    limits = Limits(*(arrays.pop(name.removesuffix("_S")) for name in Limits._fields))
    return SamplingBatch(limits=limits, **{f"{name}_S": values for name, values in arrays.items()})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("kind", ["drawn", "truncated", "greedy"])
def test_tokens_are_those_of_the_whole_with_their_ranks_and_likeliest_on_every_device(layout, kind):
    logits, rows = logits_with_ties(3), batch(3, truncated=kind == "truncated", greedy=kind == "greedy")
    logits[5, 40], logits[6, 3], logits[7, 56] = np.nan, np.inf, -np.inf
    logits[10:20, :50] = np.finfo(np.float32).min  # withheld

    def on_part(part: VocabularyPart, logits: jax.Array, rows: SamplingBatch) -> Any:
        return sample(part.without_padding(logits), rows, part=part, max_top=20)

    (expected,) = (jax.tree.map(lambda found: found[0], run(LAYOUTS[0], on_part, logits, whole=rows)),)
    found = run(layout, on_part, logits, whole=rows)
    for device in range(layout[0] * layout[1]):
        here = jax.tree.map(lambda values: values[device], found)  # noqa: B023 (used at once)
        np.testing.assert_array_equal(here.finite_S, expected.finite_S)
        assert (here.ids_S >= 0).all() and (here.ids_S < NUM_WORDS).all(), "those of rows that are not finite too"
        good = expected.finite_S
        np.testing.assert_array_equal(here.ids_S[good], expected.ids_S[good])
        np.testing.assert_array_equal(here.ranks_S[good], expected.ranks_S[good])
        np.testing.assert_array_equal(here.top.ids_SJ[good], expected.top.ids_SJ[good])
        np.testing.assert_allclose(here.logprobs_S[good], expected.logprobs_S[good], rtol=0, atol=3e-6)
        np.testing.assert_allclose(here.top.logprobs_SJ[good], expected.top.logprobs_SJ[good], rtol=0, atol=3e-6)
    assert not expected.finite_S.all() and len(set(expected.ids_S[expected.finite_S])) > 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_is_that_of_jax_to_the_last_bit_wherever_a_word_lies(layout):
    rows = batch(5, truncated=False)
    numbers = (rows.seed_S, rows.choice_S, rows.position_S)

    def on_part(part: VocabularyPart, numbers: Any) -> jax.Array:
        return gumbel_noise(*numbers, first=part.first, size=part.width)

    found = np.concatenate(run(layout, on_part, whole=numbers), axis=1)[:, :NUM_WORDS]

    @jax.jit
    @jax.vmap
    def of_row(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
        return jax.random.gumbel(key, (NUM_WORDS,), jnp.float32)

    np.testing.assert_array_equal(found, of_row(*numbers))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_adjusted_logits_and_counts_are_those_of_the_whole_to_the_last_bit(layout):
    random = np.random.default_rng(8)
    seen = random.choice([0, 0, 1, 3, PROMPT_MARK, PROMPT_MARK + 2], (NUM_ROWS, NUM_WORDS)).astype(np.int32)
    ids = np.argsort(random.random((NUM_ROWS, NUM_WORDS)), axis=1)[:, :NUM_BIASES].astype(np.int32)
    ids[::3, 2:] = NUM_WORDS
    values = random.choice([-np.inf, 2.5, -1.0], ids.shape).astype(np.float32)
    is_adjusted, withholds = random.random((2, NUM_ROWS)) < 0.5
    factors = (random.choice([0.5, 1.0, 1.7], NUM_ROWS).astype(np.float32) for _ in range(3))
    rows, logits = random.permutation(NUM_ROWS), logits_with_ties(9)
    new = random.integers(0, NUM_WORDS, NUM_ROWS)

    def on_part(part: VocabularyPart, logits: jax.Array, seen: jax.Array, whole: Any) -> Any:
        penalties, biases = whole
        of_rows = {"rows_S": rows, "penalties": penalties, "part": part}
        state = AdjustmentState(seen, *biases)
        return adjust(logits, state, **of_rows), record_samples(seen, jnp.asarray(new), **of_rows)

    whole = (Penalties(is_adjusted | withholds, *factors, withholds), (ids, values))
    expected, found = (
        [np.concatenate(each, axis=1)[:, :NUM_WORDS] for each in run(one, on_part, logits, seen, whole=whole)]
        for one in (LAYOUTS[0], layout)
    )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert (expected[0] != logits).mean() > 0.1 and (expected[1] != seen).sum() > 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_probability_and_rank_of_any_token_are_those_of_its_definition(layout):
    logits, ids = logits_with_ties(11), np.arange(NUM_ROWS, dtype=np.int32) % NUM_WORDS

    def on_part(part: VocabularyPart, logits: jax.Array, ids: jax.Array) -> Any:
        found = log_probs_of(part.without_padding(logits), jnp.ones(NUM_ROWS), part=part)
        own = log_prob_of(found.logprobs_SV, ids, part=part)
        return own, ranks_of(found.logprobs_SV, ids, own, part=part)

    own, ranks = run(layout, on_part, logits, whole=ids)
    wide = logits.astype(np.float64)
    defined = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    places = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1) + 1
    for device in range(layout[0] * layout[1]):
        np.testing.assert_allclose(own[device], defined[np.arange(NUM_ROWS), ids], rtol=0, atol=3e-6)
        np.testing.assert_array_equal(ranks[device], places[np.arange(NUM_ROWS), ids])
