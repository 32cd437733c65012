"""Budgets of reasoning under the names of every route, and reasoning in the counts of usage."""

from __future__ import annotations

import httpx
import pytest

from rayserve_moe import Engine
from tests.http.conftest import served
from tests.support.models.scripted import MODEL, SCRIPTS
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, stream

USER = [{"role": "user", "content": "hi"}]
ASKED = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 30}
THOUGHTS = ["\nI nee", "d f.\n"]
REST = "".join(SCRIPTS["a"][4:])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (1, 1), (2, 2), (9, 2), (-1, 2), (None, 2)])
def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(scripted_http, streams, budget, kept):
    body = {**ASKED, "thinking_token_budget": budget, "stream_options": {"include_usage": True} if streams else None}
    if streams:
        *events, last = stream(scripted_http, CHAT, **body)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        thought, said = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))
        usage = last["usage"]
    else:
        answer = ask(scripted_http, CHAT, **body)
        message, usage = answer["choices"][0]["message"], answer["usage"]
        thought, said = message["reasoning"] or "", message["content"]
    assert thought == "".join(THOUGHTS[:kept]).strip("\n") and said == REST.strip("\n")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": kept}


def output_of(scripted: Engine, ids: list[int]) -> str:
    return scripted.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE, TOKENS])
def test_routes_without_messages_have_the_same_budget(scripted, scripted_http, path):
    ids = scripted.tokenizer.encode("xa")
    if path == GENERATE:
        sampling = {"max_new_tokens": 6, "temperature": 0}
        told = ask(scripted_http, path, input_ids=ids, sampling_params=sampling, max_thinking_tokens=1)["output_ids"]
    elif path == TOKENS:
        sampling = {"max_tokens": 6, "temperature": 0, "thinking_token_budget": 1}
        told = ask(scripted_http, path, token_ids=ids, sampling_params=sampling)["choices"][0]["token_ids"]
    else:
        body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "thinking_token_budget": 1, "return_token_ids": True}
        told = ask(scripted_http, path, **body)["choices"][0]["token_ids"]
    assert output_of(scripted, told).startswith("<think>\nI nee</think>\n\nLet me")


def test_the_engine_in_process_and_other_systems_routes_have_it_too(scripted, scripted_http):
    ids = scripted.tokenizer.encode("xa")
    answer = scripted.generate(input_ids=ids, max_new_tokens=6, temperature=0, max_thinking_tokens=1)
    assert output_of(scripted, answer["output_ids"]).startswith("<think>\nI nee</think>\n\nLet me")
    thinking = {"type": "enabled", "budget_tokens": 1}
    body = {"model": MODEL, "messages": USER, "max_tokens": 30, "temperature": 0}
    assert ask(scripted_http, "/v1/messages", **body, thinking=thinking)["content"][0]["thinking"] == "I nee"
    asked = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 30}
    told = ask(scripted_http, "/v1/responses", **asked, thinking_token_budget=1)
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert ask(scripted_http, "/v1/responses", **asked)["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_a_constraint_holds_after_the_budget(scripted_http):
    body = {**ASKED, "thinking_token_budget": 1, "structured_outputs": {"regex": "[bc]{3}"}, "reasoning_effort": None}
    kwargs = {"chat_template_kwargs": {"script": "a<think>"}}
    (choice,) = ask(scripted_http, CHAT, **body, **kwargs)["choices"]
    assert choice["message"]["reasoning"] == "I nee" and set(choice["message"]["content"]) <= {"b", "c"}
    assert len(choice["message"]["content"]) == 3 and choice["finish_reason"] == "stop"


def test_a_budget_needs_markers(engine):
    with served(engine) as url:
        answer = httpx.post(f"{url}{GENERATE}", json={"input_ids": [5], "max_thinking_tokens": 5}, timeout=600)
    error = check_error(answer, 400)
    assert error["param"] == "max_thinking_tokens" and "reasoning_parser" in error["message"]


def test_the_end_of_reasoning_is_no_end_of_the_answer(scripted, scripted_http):
    (end,) = scripted.tokenizer.encode("</think>", add_special_tokens=False)
    body = {**ASKED, "thinking_token_budget": 5, "stop_token_ids": [end]}
    assert check_error(scripted_http.post(CHAT, json=body), 400)["param"] == "stop_token_ids"
