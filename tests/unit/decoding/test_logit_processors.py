"""Logit processors on logits: only rows that ask are changed, masks win, and no row is left without words."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.logit_processors import LOGIT_PROCESSORS, no_repeat_ngram
from rayserve_moe.decoding.evidence import sampling_mask
from rayserve_moe.decoding.logit_processors import LogitProcessor, ProcessedRows, allowed_logits
from rayserve_moe.decoding.sampling import SamplingBatch, sample
from rayserve_moe.decoding.truncation import Limits
from rayserve_moe.kernels.reference.layers import masses_of
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.requests.processor_arguments import NOT_PROCESSED, NUM_RECENT, processed_row, row_size

WORDS = 40
PART = VocabularyPart(WORDS, WORDS)
EVERY = np.full((3, 2), -1, np.int32)
ARGUMENTS = [processor.arguments for processor in LOGIT_PROCESSORS]


def given_rows(*rows: tuple[dict, list[int]] | None) -> np.ndarray:
    """What rows are given that ask so, after these tokens; None for one that asks nothing."""
    found = np.zeros((len(rows), row_size(ARGUMENTS) + 1 + NUM_RECENT), np.int32)
    for place, row in enumerate(rows):
        found[place, -1 - NUM_RECENT :] = NOT_PROCESSED
        if row is not None:
            found[place, : -1 - NUM_RECENT] = processed_row(row[0], ARGUMENTS)
            found[place, -1 - NUM_RECENT] = len(row[1])
            found[place, found.shape[1] - len(row[1]) :] = row[1]
    return found


def run(logits: np.ndarray, mask: np.ndarray, given: np.ndarray) -> np.ndarray:
    changed = jax.jit(
        lambda *arrays: allowed_logits(*arrays[:2], given_SX=arrays[2], processors=LOGIT_PROCESSORS, part=PART)
    )
    return np.asarray(changed(logits, mask, given))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, WORDS)).astype(np.float32)


def test_rows_that_ask_for_nothing_keep_their_logits(logits: np.ndarray):
    changed = run(logits, EVERY, given_rows(None, ({"top_n_sigma": 0.5}, [1]), None))
    np.testing.assert_array_equal(changed[[0, 2]], logits[[0, 2]])
    kept = logits[1] >= logits[1].max() - 0.5 * logits[1].std()
    np.testing.assert_array_equal(changed[1], np.where(kept, logits[1], np.finfo(np.float32).min))
    np.testing.assert_array_equal(run(logits, EVERY, given_rows(None, None, None)), logits)


def test_masks_win_and_no_row_is_left_without_words(logits: np.ndarray):
    """The second row may be the three words alone that the processor bans: it keeps them as they were."""
    mask = EVERY.copy()
    mask[1] = [0b111, 0]
    changed = run(logits, mask, given_rows(None, ({"no_repeat_ngram": 1}, [0, 1, 2, 9]), None))
    np.testing.assert_array_equal(changed[1, :3], logits[1, :3])
    assert (changed[1, 3:] == np.finfo(np.float32).min).all()
    mask[1] = [0b1111, 0]
    changed = run(logits, mask, given_rows(None, ({"no_repeat_ngram": 1}, [0, 1, 2, 9]), None))
    assert np.flatnonzero(changed[1] > -1e30).tolist() == [3]


def test_logits_that_are_not_finite_are_still_found(logits: np.ndarray):
    logits[1, 5] = np.nan
    changed = run(logits, EVERY, given_rows(None, ({"top_n_sigma": 0.5}, [1]), None))
    assert not np.isfinite(changed[1]).all() and np.isfinite(changed[[0, 2]]).all()


@jax.jit
def logits_without_repeats(recent: jax.Array, lengths: jax.Array, sizes: jax.Array) -> jax.Array:
    rows = ProcessedRows(recent, lengths, {"no_repeat_ngram": sizes})
    return no_repeat_ngram(jnp.zeros((1, 4)), rows, part=VocabularyPart(4, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", range(1, 5))
def test_no_ngram_is_repeated(size: int):
    generator = np.random.default_rng(size)
    for length in (1, 3, 20, NUM_RECENT):
        recent = generator.integers(0, 4, length).tolist()
        banned = {
            recent[end]
            for end in range(size - 1, length)
            if recent[end - size + 1 : end] == recent[length - size + 1 :] and length >= size - 1
        }
        padded = np.full((1, NUM_RECENT), -1, np.int32)
        padded[0, NUM_RECENT - length :] = recent
        left = logits_without_repeats(padded, np.array([length]), np.array([size]))
        assert set(np.flatnonzero(np.isneginf(np.asarray(left)[0])).tolist()) == banned


def test_a_list_has_one_length_and_its_own_kind():
    def plus(logits_SV: jax.Array, rows: ProcessedRows, *, part: VocabularyPart) -> jax.Array:
        return logits_SV + rows.arguments["added"].sum(axis=1, keepdims=True) + rows.arguments["count"][:, None]

    processor = LogitProcessor(plus, {"added": [0.5, 0.25], "count": 2})
    given = np.zeros((1, 4 + 1 + NUM_RECENT), np.int32)
    given[0, :4] = processed_row({"added": [1.5]}, [processor.arguments])
    changed = allowed_logits(jnp.zeros((1, WORDS)), EVERY[:1], given_SX=given, processors=[processor], part=PART)
    np.testing.assert_array_equal(changed, np.full((1, WORDS), 1.5 + 0.25 + 2))


def test_support_is_what_truncation_leaves(logits: np.ndarray):
    rows = SamplingBatch(
        temperature_S=np.array([1.0, 0.0, 2.0], np.float32),
        limits=Limits(
            top_k_S=np.array([3, 0, 0], np.uint32),
            top_p_S=np.ones(3, np.float32),
            min_p_S=np.array([0.0, 0.0, 0.4], np.float32),
        ),
        seed_S=np.zeros(3, np.uint32),
        choice_S=np.zeros(3, np.uint32),
        position_S=np.zeros(3, np.uint32),
        num_top_S=np.zeros(3, np.uint32),
    )
    sampled = jax.jit(partial(sample, part=PART, max_top=1, returns_kept=True))(logits, rows)
    ids, wants = np.asarray(sampled.ids_S), np.ones(3, bool)
    assert sampled.kept is not None
    mask_of = jax.jit(partial(sampling_mask, part=PART, masses=masses_of))
    bits, among = mask_of(sampled.kept, ids, wants_S=wants, temperature_S=rows.temperature_S)
    kept = np.unpackbits(np.asarray(bits).view(np.uint8), axis=1, bitorder="little")[:, :WORDS].astype(bool)
    probabilities = np.exp(logits / np.array([[1.0], [1.0], [2.0]]))
    expected = [
        np.sort(np.argsort(-logits[0])[:3]),
        ids[1:2],
        np.flatnonzero(probabilities[2] >= 0.4 * probabilities[2].max()),
    ]
    for row, words in enumerate(expected):
        assert np.flatnonzero(kept[row]).tolist() == words.tolist()
        share = probabilities[row, ids[row]] / probabilities[row, words].sum()
        assert among[row] == pytest.approx(np.log(share), abs=1e-5)
