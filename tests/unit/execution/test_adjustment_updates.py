"""What adjusts a row reaches it whole, in however many vectors, and makes it forget its owner before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from rayserve_moe.decoding.adjustment import PROMPT_MARK
from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.execution.step.row_updates import (
    ADJUSTMENT_SIZE,
    MAX_BIASES,
    MAX_IDS,
    adjustment_vectors,
    apply_adjustment,
    no_adjustment,
)
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.scheduling.step_plan import RowAdjustment
from tests.support.devices.rank_state import state_of_rows

NUM_ROWS, NUM_RANKS, VOCABULARY = 3, 2, 50
compiled = jax.jit(partial(apply_adjustment, part=VocabularyPart(VOCABULARY, VOCABULARY)))


def rows() -> DeviceState:
    """The rows of a rank, and what adjusts those of all ranks, full of what their owners before have left."""
    seen = np.full((NUM_RANKS * NUM_ROWS, VOCABULARY), PROMPT_MARK + 3, np.int32)
    ids, values = np.ones((2, NUM_RANKS * NUM_ROWS, MAX_BIASES), np.int32)
    return state_of_rows(NUM_ROWS, seen_RV=seen, bias_ids_RB=ids, bias_values_RB=values.astype(np.float32))


def adjustment(row: int, num_prompt: int, num_outputs: int, *, num_biases: int = 2) -> RowAdjustment:
    generator = np.random.default_rng(num_prompt + num_outputs)
    prompt, outputs = (generator.integers(0, VOCABULARY - 9, n).astype(np.int32) for n in (num_prompt, num_outputs))
    bias_ids = np.arange(num_biases, dtype=np.int32)
    return RowAdjustment(row, prompt, outputs, bias_ids, np.linspace(-1, 1, num_biases, dtype=np.float32))


def applied(told: RowAdjustment) -> DeviceState:
    state = rows()
    for vector in adjustment_vectors(told, rows_per_rank=NUM_ROWS):
        assert vector.shape == (ADJUSTMENT_SIZE,) and vector.dtype == np.int32
        state = compiled(state, vector)
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    ("num_prompt", "num_outputs"), [(0, 0), (1, 0), (5, 7), (MAX_IDS, 3), (MAX_IDS - 2, 5), (2 * MAX_IDS + 9, MAX_IDS)]
)
def test_a_row_knows_its_tokens_and_nothing_else(num_prompt: int, num_outputs: int):
    told = adjustment(4, num_prompt, num_outputs)
    found = applied(told)
    counts = Counter(told.output_ids.tolist())
    prompt = set(told.prompt_ids.tolist())
    expected = [(PROMPT_MARK if word in prompt else 0) + counts[word] for word in range(VOCABULARY)]
    np.testing.assert_array_equal(found.seen_RV[4], expected)
    np.testing.assert_array_equal(found.bias_ids_RB[4, :2], told.bias_ids)
    np.testing.assert_array_equal(found.bias_values_RB[4, :2], told.bias_values)
    assert (found.bias_ids_RB[4, 2:] == VOCABULARY).all(), "no word has the id of a bias that is none"
    before, adjusting = rows(), ("seen_RV", "bias_ids_RB", "bias_values_RB")
    for name in adjusting:
        np.testing.assert_array_equal(np.delete(getattr(found, name), 4, 0), np.delete(getattr(before, name), 4, 0))
    of_rows = {name: getattr(before, name) for name in adjusting}
    jax.tree.map(np.testing.assert_array_equal, replace(found, **of_rows), before)


def test_padding_changes_nothing():
    state = compiled(rows(), no_adjustment())
    jax.tree.map(np.testing.assert_array_equal, state, rows())


def test_all_biases_fit():
    told = adjustment(0, 1, 1, num_biases=MAX_BIASES)
    np.testing.assert_array_equal(applied(told).bias_values_RB[0], told.bias_values)
