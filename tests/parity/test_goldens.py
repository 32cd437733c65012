"""The engine against the committed goldens of the Hugging Face implementation; needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity import comparison
from tests.parity.cases import CASES, NUM_NEW_TOKENS, PROMPT_LENGTHS, Golden, load_golden, prompts_of, sha256_of_weights
from tests.support.models.full_logits import prompt_logits_of


@pytest.fixture(scope="module")
def golden(case) -> Golden:
    return load_golden(case)


@pytest.fixture(scope="module")
def answers(engine, case) -> list[dict[str, Any]]:
    return comparison.generate_answers(engine, case)


def test_the_seed_still_makes_the_weights_of_the_golden(golden, checkpoint):
    assert sha256_of_weights(checkpoint) == golden.weights_sha256.item(), "run `python -m tests.parity.make_goldens`"


def test_the_seed_still_makes_the_prompts_of_the_golden(golden, case):
    assert [len(prompt) for prompt in prompts_of(case)] == list(PROMPT_LENGTHS)
    assert np.concatenate(prompts_of(case)).tolist() == golden.prompts.tolist()


def test_greedy_ids_are_those_of_the_reference(golden, answers):
    comparison.assert_same_ids(golden, answers)


def test_logits_are_those_of_the_reference(golden, engine, case):
    longest = max(PROMPT_LENGTHS) + NUM_NEW_TOKENS
    comparison.assert_same_logits(golden, case, prompt_logits_of(engine.runner, longest=longest))


def test_logprobs_are_those_of_the_reference(golden, answers):
    comparison.assert_same_logprobs(golden, answers)


def test_routing_rows_are_those_of_the_reference_in_order(golden, answers, case):
    comparison.assert_same_routing(golden, answers, case.config.num_hidden_layers)


def test_the_cases_cover_dense_layers_tied_embeddings_and_both_normalisations():
    layers = [set(range(case.config.num_hidden_layers)) - set(load_golden(case).layer_ids.tolist()) for case in CASES]
    assert any(layers) and not all(layers)
    assert {case.config.tie_word_embeddings for case in CASES} == {True, False}
    assert {case.config.norm_topk_prob for case in CASES} == {True, False}
