"""Routing as input: a prompt scored under the routing of its rollout has the rollout's log-probs."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from rayserve_moe.replay.encoding import DIALECTS
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.rollouts.alignment import decode_answer
from tests.support.serving.http_client import COMPLETIONS, GENERATE, TOKENS, ask, check_error, scored

PROMPT = [*range(60, 80)]
NUM_NEW = 8
CLOSE = {"rel": 0, "abs": 1e-5}


@pytest.fixture
def rollout(http):
    """A sampled answer: its text in ids, its log-probs, its routing."""
    sampling = {"max_new_tokens": NUM_NEW, "sampling_seed": 3, "ignore_eos": True}
    answer = ask(
        http, GENERATE, input_ids=PROMPT, sampling_params=sampling, return_logprob=True, return_routed_experts=True
    )
    return PROMPT + answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]], answer


def replayed_under(http, text, forced):
    """Score a text under forced routing; returns the log-probs of its last tokens, and the answer."""
    answer = scored(http, text, len(PROMPT) - 1, return_routed_experts=True, forced_routed_experts=forced)
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], answer


@pytest.mark.parametrize("dialect", ["sglang", "nested", "npy", "packed", "packed-int16"])
def test_the_rollout_s_own_rows_give_its_log_probs(http, layout, rollout, dialect):
    text, logprobs, answer = rollout
    routing = decode_answer(answer, layout)
    ours, replayed = replayed_under(http, text, DIALECTS[dialect].encode(routing, layout))
    assert ours == pytest.approx(logprobs, **CLOSE)
    np.testing.assert_array_equal(decode_answer(replayed, layout).rows[: len(routing.rows)], routing.rows)


def test_other_rows_give_other_log_probs_and_come_back_as_they_were_given(http, layout, rollout):
    text, logprobs, answer = rollout
    rows = decode_answer(answer, layout).rows
    other = RoutedExperts(((rows.astype(np.int64) + 1) % layout.num_experts).astype(rows.dtype))
    ours, replayed = replayed_under(http, text, DIALECTS["packed"].encode(other, layout))
    assert max(abs(a - b) for a, b in zip(ours, logprobs, strict=True)) > 1e-3
    np.testing.assert_array_equal(decode_answer(replayed, layout).rows[: len(rows)], other.rows)
    free, _ = replayed_under(http, text, None)
    assert free == pytest.approx(logprobs, **CLOSE)


def test_every_route_takes_forced_rows(http, layout, rollout):
    text, logprobs, answer = rollout
    forced = DIALECTS["packed"].encode(decode_answer(answer, layout), layout)
    echoed = ask(
        http,
        COMPLETIONS,
        prompt=[text, text],
        max_tokens=0,
        echo=True,
        logprobs=0,
        forced_routed_experts=[forced, None],
    )
    for choice in echoed["choices"]:
        assert choice["logprobs"]["token_logprobs"][len(PROMPT) :] == pytest.approx(logprobs, **CLOSE)
    told = ask(
        http,
        TOKENS,
        token_ids=text,
        sampling_params={"max_tokens": 0, "prompt_logprobs": 0},
        forced_routed_experts=forced,
    )["prompt_logprobs"]
    pairs = zip(text[len(PROMPT) :], told[len(PROMPT) :], strict=True)
    assert [score[str(token_id)]["logprob"] for token_id, score in pairs] == pytest.approx(logprobs, **CLOSE)


def wrong_rows(layout, rows):
    """What no router of this model selects for this prompt, by what is wrong with it."""
    packed = DIALECTS["packed"].encode(RoutedExperts(rows), layout)
    twice, beyond = rows.copy(), rows.copy()
    twice[3, 0, :] = 0
    beyond[3, 0, 0] = layout.num_experts
    yield "one row too few", DIALECTS["packed"].encode(RoutedExperts(rows[:-1]), layout)
    yield "rows of a longer prompt", DIALECTS["packed"].encode(RoutedExperts(np.concatenate([rows, rows])), layout)
    yield "an expert twice", DIALECTS["packed"].encode(RoutedExperts(twice), layout)
    yield "an expert that is none", DIALECTS["npy"].encode(RoutedExperts(beyond), layout)
    yield "another shape", {**packed, "shape": [packed["shape"][0], packed["shape"][2], packed["shape"][1]]}
    yield "other layers", {**packed, "shape": [len(rows) * 2, packed["shape"][1] // 2, packed["shape"][2]]}
    yield "a shape of petabytes", {**packed, "shape": [2**40, 2**20, 8]}
    yield "a start behind the prompt", {**packed, "start": len(PROMPT)}
    yield "an unknown dtype", {**packed, "dtype": "zq7-marker"}
    yield "no base64", {**packed, "data": "zq7-marker!"}
    yield "no rows", []
    yield "rows of different lengths", [[[0, 1], [0]]]
    yield "a pickle", base64.b64encode(b"\x93NUMPY\x01\x00" + b"zq7-marker").decode()


def test_wrong_rows_are_refused(http, layout, rollout):
    text, _, answer = rollout
    rows = decode_answer(answer, layout).rows
    for name, forced in wrong_rows(layout, rows):
        body = {"input_ids": text, "sampling_params": {"max_new_tokens": 0}, "forced_routed_experts": forced}
        error = check_error(http.post(GENERATE, json=body), 400)
        assert error["param"] == "forced_routed_experts" and "forced_routed_experts" in error["message"], name
