"""Penalties and biases reach the sampler from every dialect."""

from __future__ import annotations

import math

import pytest

from tests.http.asking import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, prompt_fields

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


@pytest.mark.parametrize("temperature", [0, 0.01, 2])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TOKENS])
def test_only_allowed_ids_are_sampled_and_scored_among_themselves(http, path, temperature):
    allowed, top = [9, 200, 450], {CHAT: {"logprobs": True, "top_logprobs": 3}}.get(path, {"logprobs": 3})
    sampling = {"allowed_token_ids": allowed, "max_tokens": 8, "temperature": temperature, "ignore_eos": True, **top}
    ids = {"return_token_ids": True}
    if path == TOKENS:
        answer = ask(http, path, token_ids=[5, 6], sampling_params=sampling)
        entries = answer["choices"][0]["logprobs"]["content"]
    elif path == CHAT:
        answer = ask(http, path, messages=[{"role": "user", "content": "x"}], **sampling, **ids)
        entries = answer["choices"][0]["logprobs"]["content"]
    else:
        answer = ask(http, path, prompt=[5, 6], **sampling, **ids)
        entries = [
            {"top_logprobs": [{"logprob": value} for value in top.values()]}
            for top in answer["choices"][0]["logprobs"]["top_logprobs"]
        ]
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)
    for entry in entries:
        shares = [math.exp(token["logprob"]) for token in entry["top_logprobs"]]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
