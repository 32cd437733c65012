"""Penalties and biases do what their definition says, and leave rows that ask for none alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.adjustment import AdjustmentState, Penalties, adjust, record_known_tokens, record_samples
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.requests.records import SamplingParams
from tests.support.engine.sampling_reference import adjusted_by_definition

VOCABULARY, NUM_ROWS, NUM_BIASES = 24, 5, 6
WHOLE = VocabularyPart(VOCABULARY, VOCABULARY)
compiled_adjust = jax.jit(partial(adjust, part=WHOLE))
compiled_note = jax.jit(partial(record_samples, part=WHOLE))


def state_of(prompts: dict[int, list[int]], outputs: dict[int, list[int]], biases: dict[int, list]) -> AdjustmentState:
    """Rows that know these tokens; rows that are not named hold something stale."""
    seen = np.full((NUM_ROWS, VOCABULARY), 7, np.int32)
    ids, values = np.full((2, NUM_ROWS, NUM_BIASES), 3, np.float32)
    for row, prompt in prompts.items():
        known = np.asarray([*prompt, *outputs[row]], np.int32)
        seen[row] = record_known_tokens(
            jnp.zeros(VOCABULARY, jnp.int32), known, num_prompt=len(prompt), num_known=len(known)
        )
        ids[row], values[row] = VOCABULARY, 0
        for i, (token_id, value) in enumerate(biases.get(row, [])):
            ids[row, i], values[row, i] = token_id, value
    return AdjustmentState(seen, ids.astype(np.int32), values)


def penalties_of(params: list[SamplingParams | None]) -> Penalties:
    fields = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    columns = [[getattr(p or SamplingParams(), name) for p in params] for name in fields]
    withholds = np.array([p is not None and p.min_new_tokens > 0 for p in params])
    return Penalties(
        np.array([p is not None for p in params]), *(np.asarray(c, np.float32) for c in columns), withholds
    )


PROMPTS, OUTPUTS = {0: [1, 2, 2], 2: [5], 4: [9, 1, 0]}, {0: [2, 3, 3, 3], 2: [], 4: [9, 9]}
BIASES = {2: [(5, 2.0), (23, -9.0)], 4: [(9, 1.5)]}


def test_rows_are_adjusted_by_definition_each_by_its_own():
    logits = (np.random.default_rng(1).standard_normal((4, VOCABULARY)) * 3).astype(np.float32)
    params = [
        SamplingParams(
            repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=tuple(BIASES[4])
        ),
        None,
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=-1.0, logit_bias=tuple(BIASES[2])),
    ]
    rows = np.array([4, 1, 0, 2])
    state = state_of(PROMPTS, OUTPUTS, BIASES)
    found = compiled_adjust(logits, state, rows_S=rows, penalties=penalties_of(params))
    np.testing.assert_array_equal(found[1], logits[1])
    for i in (0, 2, 3):
        row, of_row = int(rows[i]), params[i]
        assert of_row is not None
        expected = adjusted_by_definition(logits[i], of_row, prompt=PROMPTS[row], outputs=OUTPUTS[row])
        np.testing.assert_allclose(found[i], expected, rtol=1e-6, atol=1e-6)


def test_withheld_words_keep_no_probability_whatever_else_raises_them_and_later_cost_nothing():
    logits = np.random.default_rng(4).standard_normal((3, VOCABULARY)).astype(np.float32)
    withheld = [(3, -np.inf), (23, -np.inf)]
    state = state_of({0: [], 2: []}, {0: [], 2: []}, {0: [(3, 50.0), *withheld[:1]], 2: withheld})
    params = [SamplingParams(min_new_tokens=1), SamplingParams(presence_penalty=-2.0), SamplingParams(min_new_tokens=1)]
    rows = np.array([2, 0, 0])
    found = np.asarray(compiled_adjust(logits, state, rows_S=rows, penalties=penalties_of(params)))
    np.testing.assert_array_equal(
        np.isclose(found[0], np.finfo(np.float32).min), np.isin(np.arange(VOCABULARY), [3, 23])
    )
    np.testing.assert_array_equal(found[0, 4:23], logits[0, 4:23])
    assert found[1, 3] == logits[1, 3] + 50, "nothing is withheld from this row any more"
    probabilities = np.asarray(jax.nn.softmax(found[2]))
    assert probabilities[3] == 0 and np.isfinite(found).all()


def test_only_allowed_words_keep_a_probability_with_all_that_else_changes_them():
    logits = (np.random.default_rng(5).standard_normal((3, VOCABULARY)) * 3).astype(np.float32)
    allowed = (2, 5, 23)
    some = SamplingParams(
        allowed_token_ids=allowed, logit_bias=((5, 2.0), (7, 90.0)), min_new_tokens=1, stop_token_ids=(23,)
    )
    others = SamplingParams(presence_penalty=0.5)
    entries = [*((token_id, np.inf) for token_id in allowed), *some.logit_bias, (23, -np.inf)]
    state = state_of({0: [], 2: []}, {0: [], 2: [2]}, {0: entries})
    found = np.asarray(
        compiled_adjust(logits, state, rows_S=np.array([0, 2, 0]), penalties=penalties_of([some, others, None]))
    )
    expected = adjusted_by_definition(logits[0], some, prompt=[], outputs=[])
    np.testing.assert_allclose(found[0], np.maximum(expected, np.finfo(np.float32).min), rtol=1e-6)
    assert np.isfinite(expected).sum() == 2, "the third one is withheld"
    expected = adjusted_by_definition(logits[1], others, prompt=[], outputs=[2])
    np.testing.assert_allclose(found[1], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[2], logits[2])


def test_nothing_is_touched_where_nobody_adjusts():
    logits = np.random.default_rng(2).standard_normal((3, VOCABULARY)).astype(np.float32)
    state = state_of({}, {}, {})
    penalties = penalties_of([None] * 3)
    rows = np.array([0, 1, NUM_ROWS])
    np.testing.assert_array_equal(compiled_adjust(logits, state, rows_S=rows, penalties=penalties), logits)
    after = compiled_note(state.seen_RV, np.array([1, 2, 3]), rows_S=rows, penalties=penalties)
    np.testing.assert_array_equal(after, state.seen_RV)


def test_a_sample_counts_from_the_next_step_on():
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    seen = state_of({0: [4], 2: [4]}, {0: [], 2: []}, {}).seen_RV
    rows, penalties = np.array([2, 0]), penalties_of(params)
    for ids in ([6, 4], [6, 7], [8, 7]):
        seen = compiled_note(seen, np.array(ids), rows_S=rows, penalties=penalties)
    expected = state_of({0: [4], 2: [4]}, {0: [4, 7, 7], 2: [6, 6, 8]}, {})
    np.testing.assert_array_equal(seen, expected.seen_RV)


@pytest.mark.parametrize("piece", [1, 3, 8])
def test_known_tokens_may_come_in_pieces(piece: int):
    generator = np.random.default_rng(3)
    ids, num_prompt = generator.integers(0, VOCABULARY, 40).astype(np.int32), 25
    note = jax.jit(record_known_tokens)
    whole = note(np.zeros(VOCABULARY, np.int32), ids, num_prompt=num_prompt, num_known=40)
    seen = np.zeros(VOCABULARY, np.int32)
    for first in range(0, 40, piece):
        part = np.zeros(10, np.int32)
        count = len(ids[first : first + piece])
        part[:count] = ids[first : first + piece]
        seen = note(seen, part, num_prompt=min(max(num_prompt - first, 0), count), num_known=count)
    np.testing.assert_array_equal(seen, whole)
