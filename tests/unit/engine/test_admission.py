"""Requests that no waiting can serve are refused by name before they are queued."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.engine.admission import check_request
from rayserve_moe.requests import GenerationRequest, RequestError, SamplingParams
from tests.support.counting import CARD

LONGEST = 80


def request(prompt: object = (1, 2, 3), *, routing: bool = False, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 4, **sampling})
    return GenerationRequest("r", np.asarray(prompt, np.int32), params, routing)


REFUSED = {
    "empty prompt": (request([]), "prompt", "empty"),
    "negative id": (request([3, -1]), "prompt", r"\[0, 1000\)"),
    "id beyond the vocabulary": (request([1000]), "prompt", r"\[0, 1000\)"),
    "negative length": (request(max_new_tokens=-1), "max_tokens", "negative"),
    "no choice": (request(n=0), "max_tokens", "n must be"),
    "prompt beyond the context": (request(np.ones(101), max_new_tokens=0), "prompt", "context of 100"),
    "answer beyond the context": (request(max_new_tokens=98), "max_tokens", "context of 100"),
    "more than the pool": (request(max_new_tokens=78), "max_tokens", "pool of 80"),
    "routing of a server without": (request(routing=True), "return_routed_experts", "enable_return_routed_experts"),
    "negative temperature": (request(temperature=-0.1), "temperature", "at least 0"),
    "endless temperature": (request(temperature=float("inf")), "temperature", "finite"),
    "temperature that is no number": (request(temperature=float("nan")), "temperature", "finite"),
    "negative top_k": (request(top_k=-5), "top_k", "top_k must be in"),
    "top_k beyond 32 bits": (request(top_k=2**40), "top_k", "top_k must be in"),
    "top_p of zero": (request(top_p=0.0), "top_p", r"\(0, 1\]"),
    "top_p above one": (request(top_p=1.5), "top_p", r"\(0, 1\]"),
    "top_p that is no number": (request(top_p=float("nan")), "top_p", r"\(0, 1\]"),
    "negative min_p": (request(min_p=-0.5), "min_p", r"\[0, 1\]"),
    "min_p that is no number": (request(min_p=float("nan")), "min_p", r"\[0, 1\]"),
}


@pytest.mark.parametrize(("refused", "param", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_by_name(refused, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_request(refused, CARD, longest=LONGEST)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "accepted",
    [
        request([0, 999]),
        request(max_new_tokens=77),
        request(np.ones(80), max_new_tokens=0),
        request(n=128, temperature=0.0),
        request(temperature=1e-30, top_k=2**31 - 1, top_p=1e-9, min_p=1.0),
    ],
)
def test_the_limits_themselves_are_served(accepted):
    check_request(accepted, CARD, longest=LONGEST)


def test_a_server_with_routing_serves_it():
    check_request(request(routing=True), replace(CARD, returns_routing=True), longest=LONGEST)
