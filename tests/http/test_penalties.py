"""Penalties and biases reach the sampler from every dialect."""

from __future__ import annotations

import math

import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, prompt_fields


def test_neutral_values_change_nothing(http):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    held, free = (
        ask(http, GENERATE, **prompt_fields(GENERATE, [5, 6, 7, 8], max_tokens=24, **sampling))["output_ids"]
        for sampling in (neutral, {})
    )
    assert held == free


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
