"""What trainers read from the answers to their first requests, by the names and in the places that their code has."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from rayserve_moe.serving.middleware.ignored_fields import HEADER
from tests.http.trainer_requests import COMPUTED, REFUSED
from tests.support.serving.http_client import CHAT, GENERATE, ask, check_error


def check_rows(meta, layout, num_tokens):
    """Routing as clients of SGLang decode it: int32 of all layers, from `routed_experts_start_len` on."""
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    shape = num_tokens - 1 - meta["routed_experts_start_len"], layout.num_hidden_layers, layout.top_k
    assert rows.size == np.prod(shape) and rows.max() < layout.num_experts


def check_outputs(meta, ids):
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert all(np.isfinite(entry[0]) and entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["completion_tokens"] == len(ids) and isinstance(meta["weight_version"], str)
    assert {"prompt_tokens", "cached_tokens", "finish_reason", "e2e_latency"} <= set(meta)


def read_native(answer, body, layout):
    meta = answer["meta_info"]
    check_outputs(meta, answer["output_ids"])
    assert meta["finish_reason"]["type"] in ("stop", "length") and meta["prompt_tokens"] == len(body["input_ids"])
    if body.get("return_routed_experts"):
        check_rows(meta, layout, len(body["input_ids"]) + len(answer["output_ids"]))


def read_scored_prompt(answer, body, layout):
    """Miles takes the end of the entries: one per prompt token from the start on."""
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == body["input_ids"][body["logprob_start_len"] :]
    assert all(entry[0] <= 0 for entry in scored[1:])


def read_teacher(answer, body, layout):
    read_native(answer, body, layout)
    meta, num_top = answer["meta_info"], body["top_logprobs_num"]
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [num_top] * (len(body["input_ids"]) - 1)


def read_tokens(answer, body, layout):
    for choice in answer["choices"]:
        content, ids = choice["logprobs"]["content"], choice["token_ids"]
        assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids]
        assert [entry["token_id"] for entry in content] == ids and all(entry["logprob"] <= 0 for entry in content)
        assert choice["finish_reason"] in ("stop", "length")
        routed = choice["routed_experts"]
        assert routed["shape"][0] == len(body["token_ids"]) + len(ids) - 1
        rows = np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])
        assert rows.max() < layout.num_experts


def read_prompt_logprobs(answer, body, layout):
    """SkyRL looks its own token up by id, prime-rl takes the first entry: they are one."""
    first, *entries = answer["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(body["token_ids"][1:], entries, strict=True):
        assert next(iter(entry)) == str(token_id) and entry[str(token_id)]["logprob"] <= 0


def read_sample(answer, body, layout):
    read_tokens(answer, body, layout)
    read_prompt_logprobs(answer, body, layout)


def read_areal_completion(answer, body, layout):
    logprobs = answer["choices"][0]["logprobs"]
    ids = [int(token.split(":")[1]) for token in logprobs["tokens"]]
    assert len(ids) == len(logprobs["token_logprobs"]) == answer["usage"]["completion_tokens"]
    assert ids and min(ids) >= 0


def read_areal_chat(answer, body, layout):
    content = answer["choices"][0]["logprobs"]["content"]
    assert len([int(entry["token"].split(":")[1]) for entry in content]) == answer["usage"]["completion_tokens"]


def read_session(answer, body, layout):
    (choice,) = answer["choices"]
    meta = choice["meta_info"]
    check_outputs(meta, [entry[1] for entry in meta["output_token_logprobs"]])
    assert answer["usage"]["prompt_tokens"] == len(body["input_ids"]) == meta["prompt_tokens"]
    assert len(meta["output_token_logprobs"]) == answer["usage"]["completion_tokens"]
    assert choice["message"]["content"] is not None
    assert meta["routed_experts_start_len"] == body["routed_experts_start_len"]
    check_rows(meta, layout, meta["prompt_tokens"] + meta["completion_tokens"])


def read_openai(answer, body, layout):
    assert answer["choices"][0]["message"]["role"] == "assistant"


READ = {
    "slime": read_native,
    "Miles": read_native,
    "Miles scoring": read_scored_prompt,
    "NeMo-RL": read_native,
    "AReaL by SGLang": read_native,
    "verl": read_teacher,
    "SkyRL": read_tokens,
    "SkyRL sample": read_sample,
    "prime-rl": read_tokens,
    "prime-rl scoring": read_prompt_logprobs,
    "AReaL by vLLM": read_areal_completion,
    "AReaL chat by vLLM": read_areal_chat,
    "Miles sessions": read_session,
    "OpenAI": read_openai,
}


@pytest.mark.parametrize("trainer", COMPUTED)
def test_a_trainer_can_read_the_answer_to_its_first_request(http, engine, trainer):
    path, body = COMPUTED[trainer]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    READ[trainer](answer.json(), body, engine.loop.card.routing)


@pytest.mark.parametrize("trainer", REFUSED)
def test_what_a_trainer_asks_beyond_that_is_refused_by_name(http, trainer):
    path, body, field, where = REFUSED[trainer]
    asked = body | field if where is None else body | {where: body[where] | field}
    assert next(iter(field)) in check_error(http.post(path, json=asked), 400)["message"]


def test_a_session_is_answered_as_the_native_route_answers_its_ids(http):
    path, body = COMPUTED["Miles sessions"]
    sampling = {"temperature": 0, "ignore_eos": True}
    chat = ask(http, path, **body | sampling | {"max_tokens": 6})
    native = ask(
        http,
        GENERATE,
        input_ids=body["input_ids"],
        sampling_params={**sampling, "max_new_tokens": 6},
        return_logprob=True,
        return_routed_experts=True,
        routed_experts_start_len=body["routed_experts_start_len"],
    )
    assert chat["choices"][0]["message"]["content"] == native["text"]
    meta = chat["choices"][0]["meta_info"]
    for field in ("output_token_logprobs", "routed_experts", "prompt_tokens", "weight_version", "finish_reason"):
        assert meta[field] == native["meta_info"][field]


def test_an_aborted_answer_still_has_its_object_of_logprobs(http, engine):
    """AReaL reads `logprobs.tokens` of whatever has ended."""
    path, body = COMPUTED["AReaL by vLLM"]
    http.post("/pause_generation", json={"mode": "in_place"})
    try:
        with http.stream("POST", path, json=body | {"stream": True, "request_id": "aborted"}) as answer:
            http.post("/abort_request", json={"rid": "aborted"})
            event = next(line for line in answer.iter_lines() if line)
    finally:
        http.post("/continue_generation")
    assert '"logprobs":{"tokens":[],"token_logprobs":[]' in event and '"finish_reason":"abort"' in event


@pytest.mark.parametrize("field", ["return_meta_info", "return_prompt_token_ids"])
def test_a_stream_has_no_room_for_what_describes_a_whole_answer(http, field):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, field: True}
    assert field in check_error(http.post(CHAT, json=body), 400)["message"]
