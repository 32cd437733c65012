"""Penalties and biases reach the sampler from every dialect."""

from __future__ import annotations

import pytest

from tests.http.asking import COMPLETIONS, GENERATE, TOKENS, ask, prompt_fields

PATHS = [COMPLETIONS, GENERATE, TOKENS]
PROMPT = [5, 6, 7, 8]


def tokens_of(http, path, **sampling):
    """The tokens of a greedy answer, as text where the dialect has no ids."""
    answer = ask(http, path, **prompt_fields(path, PROMPT, max_tokens=24, **sampling))
    if path == COMPLETIONS:
        return answer["choices"][0]["text"]
    return answer["output_ids"] if path == GENERATE else answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", PATHS)
def test_a_token_that_is_biased_upwards_is_the_only_one(http, engine, path):
    chosen = tokens_of(http, path, logit_bias={"77": 100})
    assert chosen == (engine.tokenizer.token_text(77) * 24 if path == COMPLETIONS else [77] * 24)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 100}])
def test_a_penalty_ends_a_repetition(http, path, penalty):
    """A moderate bias makes greedy decoding repeat one token, which any penalty on it undoes."""
    favoured = {"logit_bias": {"77": 3}}
    free, held = tokens_of(http, path, **favoured), tokens_of(http, path, **favoured, **penalty)
    assert len(set(held)) > len(set(free))


def test_neutral_values_change_nothing(http):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    assert tokens_of(http, GENERATE, **neutral) == tokens_of(http, GENERATE)
