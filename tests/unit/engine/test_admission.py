"""Requests that no waiting can serve are refused by name before they are queued."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.engine.admission import MAX_HIDDEN_NUMBERS, check_request
from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.records import (
    GenerationRequest,
    IndexLayout,
    RequestError,
    RoutedExperts,
    RoutingLayout,
    SamplingParams,
)
from tests.support.devices.counting_executor import CARD

LONGEST = 80


def request(prompt: object = (1, 2, 3), *, routing: bool = False, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 4, **sampling})
    return GenerationRequest("r", np.asarray(prompt, np.int32), params, routing)


REFUSED = {
    "empty prompt": (request([]), "prompt", "empty"),
    "negative id": (request([3, -1]), "prompt", r"\[0, 1000\)"),
    "id beyond the vocabulary": (request([1000]), "prompt", r"\[0, 1000\)"),
    "negative length": (request(max_new_tokens=-1), "max_tokens", r"\[0, 2147483647\]"),
    "no choice": (request(n=0), "n", r"\[1, 128\]"),
    "prompt beyond the context": (request(np.ones(101), max_new_tokens=0), "prompt", "context of 100"),
    "answer beyond the context": (request(max_new_tokens=98), "max_tokens", "context of 100"),
    "more than the pool": (request(max_new_tokens=78), "max_tokens", "pool of 80"),
    "routing of a server without": (request(routing=True), "return_routed_experts", "enable_return_routed_experts"),
    "negative temperature": (request(temperature=-0.1), "temperature", r"\[0, 100\]"),
    "endless temperature": (request(temperature=float("inf")), "temperature", "finite"),
    "temperature that is no number": (request(temperature=float("nan")), "temperature", "finite"),
    "negative top_k": (request(top_k=-5), "top_k", "top_k should be"),
    "top_k as it is only given": (request(top_k=-1), "top_k", "normal form of its field"),
    "too many choices": (request(n=129), "n", r"\[1, 128\]"),
    "a seed of more than 32 bits": (request(seed=2**40), "seed", "normal form of its field"),
    "a salt without end": (replace(request(), cache_salt="x" * 257), "cache_salt", "to 256 characters"),
    "top_k beyond 32 bits": (request(top_k=2**40), "top_k", "top_k should be"),
    "top_p of zero": (request(top_p=0.0), "top_p", r"\(0, 1\]"),
    "top_p above one": (request(top_p=1.5), "top_p", r"\(0, 1\]"),
    "top_p that is no number": (request(top_p=float("nan")), "top_p", r"\(0, 1\]"),
    "negative min_p": (request(min_p=-0.5), "min_p", r"\[0, 1\]"),
    "repetition penalty of zero": (request(repetition_penalty=0.0), "repetition_penalty", r"\[0.001, 100\]"),
    "endless repetition penalty": (request(repetition_penalty=float("inf")), "repetition_penalty", "finite"),
    "presence penalty that is no number": (request(presence_penalty=float("nan")), "presence_penalty", "finite"),
    "endless frequency penalty": (request(frequency_penalty=-float("inf")), "frequency_penalty", "finite"),
    "bias of a token that is none": (request(logit_bias=((1000, 1.0),)), "logit_bias", r"\[0, 1000\)"),
    "endless bias": (request(logit_bias=((1, float("inf")),)), "logit_bias", "finite"),
    "too many biases": (request(logit_bias=tuple((i, 1.0) for i in range(257))), "logit_bias", "at most 256"),
    "negative least length": (request(min_new_tokens=-1), "min_tokens", r"\[0, 2147483647\]"),
    "least beyond the most": (request(min_new_tokens=5), "min_tokens", r"\[0, max_tokens\]"),
    "stop strings beyond the most": (request(stop_strings_after=5), "min_tokens", r"\[0, max_tokens\]"),
    "too many ids to withhold": (
        request(min_new_tokens=1, stop_token_ids=tuple(range(128))),
        "stop_token_ids",
        "at most 128",
    ),
    "min_p that is no number": (request(min_p=float("nan")), "min_p", r"\[0, 1\]"),
}


ROUTED = replace(CARD, routing=RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2))
ROWS = np.tile(np.array([[3, 0], [7, 1]]), (3, 1, 1))
"""Good rows for the three tokens of a prompt."""


def forcing(rows: np.ndarray, *, start: int = 0, missing: tuple = ()) -> GenerationRequest:
    return replace(request(), forced_routing=RoutedExperts(np.asarray(rows), start=start, missing=missing))


NO_ROUTING = {
    "too few rows": (forcing(ROWS[:1]), "a row for every prompt token"),
    "too many rows": (forcing(np.tile(ROWS, (2, 1, 1))), "a row for every prompt token"),
    "rows that end beyond the prompt": (forcing(ROWS, start=1), "a row for every prompt token"),
    "a start before the prompt": (forcing(np.tile(ROWS, (2, 1, 1))[:4], start=-1), "a row for every prompt token"),
    "other layers": (forcing(ROWS[:, :1]), r"shape \[2, 2\]"),
    "other picks": (forcing(ROWS[..., :1]), r"shape \[2, 2\]"),
    "packed rows": (forcing(ROWS.reshape(3, 4)), r"shape \[2, 2\]"),
    "rows that are no whole numbers": (forcing(ROWS * 1.0), "whole numbers"),
    "an expert that does not exist": (forcing(ROWS + 1), r"\[0, 8\)"),
    "a negative expert": (forcing(ROWS - 1), r"\[0, 8\)"),
    "an expert twice in a row": (forcing(np.where(ROWS == 1, 7, ROWS)), "twice"),
    "a missing row": (forcing(ROWS, missing=((1, 2),)), "missing"),
}


@pytest.mark.parametrize(("refused", "message"), NO_ROUTING.values(), ids=NO_ROUTING.keys())
def test_routing_that_no_router_selects_is_refused(refused, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_request(refused, ROUTED, max_tokens=LONGEST)
    assert caught.value.param == "forced_routed_experts"


BLOCKS = replace(ROUTED, index=IndexLayout((0, 2), (1, 2), top_k=2, block_size=2))
"""Two indexes that choose blocks of two tokens."""


@pytest.mark.parametrize(
    ("last", "message"), [([0, 1], ""), ([1, 0], "ascending blocks up to 1, then -1"), ([0, 2], "blocks up to 1")]
)
def test_a_block_after_the_own_one_is_refused(last: list[int], message: str):
    chosen = np.tile(np.array([0, -1], np.int32), (3, 2, 1))
    chosen[2, 1] = last
    forced = replace(request(), forced_routing=RoutedExperts(ROWS, parts={"index": packed_index(chosen)}))
    if not message:
        check_request(forced, BLOCKS, max_tokens=LONGEST)
        return
    with pytest.raises(RequestError, match=f"row 2 must hold .*{message}") as caught:
        check_request(forced, BLOCKS, max_tokens=LONGEST)
    assert caught.value.param == "forced_indexer_topk"


@pytest.mark.parametrize(("rows", "start"), [(ROWS, 0), (ROWS[:2], 0), (ROWS[:1], 2), (ROWS[:0], 2), (ROWS[:1], 1)])
def test_routing_of_the_prompt_from_some_position_on_is_served(rows, start):
    for dtype in (np.uint8, np.int16, np.int64):
        check_request(forcing(rows.astype(dtype), start=start), ROUTED, max_tokens=LONGEST)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"num_top_logprobs": 21}, "top_logprobs"),
        ({"num_top_logprobs": -1}, "top_logprobs"),
        ({"score_prompt_from": -1}, "logprob_start_len"),
        ({"score_prompt_from": 3}, "logprob_start_len"),
    ],
)
def test_scores_of_what_is_not_there_are_refused(changes, param):
    with pytest.raises(RequestError) as caught:
        check_request(replace(request(), **changes), CARD, max_tokens=LONGEST)
    assert caught.value.param == param


@pytest.mark.parametrize(("refused", "param", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_by_name(refused, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_request(refused, CARD, max_tokens=LONGEST)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "accepted",
    [
        request([0, 999]),
        request(max_new_tokens=77),
        request(np.ones(80), max_new_tokens=0),
        request(n=128, temperature=0.0),
        request(logit_bias=tuple((i, 1.0) for i in range(256)), repetition_penalty=1e-3, presence_penalty=-2.0),
        replace(request(), num_top_logprobs=20, score_prompt_from=2),
        request(temperature=1e-30, top_k=2**31 - 1, top_p=1e-9, min_p=1.0),
    ],
)
def test_the_limits_themselves_are_served(accepted):
    check_request(accepted, CARD, max_tokens=LONGEST)


def test_a_server_with_routing_serves_it():
    check_request(request(routing=True), replace(CARD, returns_routing=True), max_tokens=LONGEST)


def test_nobody_forces_routing_on_a_balanced_selection():
    forced = RoutedExperts(np.zeros((3, 1, 1), np.int32))
    wanted = replace(request(), forced_routing=forced)
    check_request(wanted, CARD, max_tokens=LONGEST)
    with pytest.raises(RequestError, match="expert_selection: replicas_only") as error:
        check_request(wanted, replace(CARD, takes_forced_routing=False), max_tokens=LONGEST)
    assert error.value.param == "forced_routed_experts"


def test_states_are_bounded_together():
    """Of all tokens of all choices, or of the last one of the prompt and the outputs."""
    card = replace(CARD, hidden_size=MAX_HIDDEN_NUMBERS // 16)
    fits = replace(request(max_new_tokens=13), return_hidden_states="all")
    check_request(fits, card, max_tokens=LONGEST)
    check_request(replace(request(range(60), max_new_tokens=15), return_hidden_states="last"), card, max_tokens=LONGEST)
    for beyond in (request(max_new_tokens=14), request(n=2, max_new_tokens=13)):
        with pytest.raises(RequestError, match="request fewer tokens") as refused:
            check_request(replace(beyond, return_hidden_states="all"), card, max_tokens=LONGEST)
        assert refused.value.param == "return_hidden_states"
