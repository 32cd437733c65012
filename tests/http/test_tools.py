"""Tool calls and reasoning of a model that writes them, whole and streamed, as the `openai` package sees them."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from rayserve_moe import extract_routed_experts_from_meta_info
from tests.http.conftest import served
from tests.support.models.scripted import MODEL, SCRIPTS
from tests.support.serving.http_client import CHAT, ask, check_error, stream

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in "fg"
]
USER = [{"role": "user", "content": "hi"}]
ASKED = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 30, "tools": TOOLS}


def on(script: str):
    return {"chat_template_kwargs": {"script": script}}


def without_ids(calls):
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def joined(events):
    """The message that deltas add up to, and its finish reason; what a call may and may not repeat is checked."""
    message, calls, finishes = {}, [], []
    for event in events:
        (choice,) = event["choices"]
        finishes.append(choice["finish_reason"])
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            (part,) = value
            if part["index"] == len(calls):
                assert part["type"] == "function" and part["function"]["arguments"] == ""
                calls.append({key: part[key] for key in ("id", "type", "function")})
            else:
                assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    return message, calls, finishes[-1]


def test_the_openai_package_sees_calls_and_reasoning(scripted_client):
    answer = scripted_client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning == choice.message.reasoning_content == "I need f."
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("f", '{"n": 5, "s": "é <b>"}')
    assert (second.function.name, second.function.arguments) == ("g", "{}")
    assert first.id.startswith("chatcmpl-tool-") and first.id != second.id


def test_the_openai_package_streams_calls(scripted_client):
    with scripted_client.chat.completions.stream(**ASKED) as events:
        message = events.get_final_completion().choices[0].message
    whole = scripted_client.chat.completions.create(**ASKED).choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == ['{"n": 5, "s": "é <b>"}', "{}"]
    assert [call.function.name for call in message.tool_calls] == [call.function.name for call in whole.tool_calls]
    assert message.content == whole.content and message.reasoning_content == whole.reasoning_content


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}, {"tools": None}, {"tool_choice": "none"}])
@pytest.mark.parametrize(
    "reasoning", [{}, {"include_reasoning": False}, {"separate_reasoning": False}, {"stream_reasoning": False}]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stream_adds_up_to_the_plain_answer(scripted_http, script, fields, reasoning):
    asked = {**ASKED, **on(script), **fields, **reasoning, "ignore_eos": False}
    (choice,) = ask(scripted_http, CHAT, **asked)["choices"]
    events = stream(scripted_http, CHAT, **asked)
    if fields == {} or reasoning == {}:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message, calls, finish = joined(events)
    plain = choice["message"]
    assert finish == choice["finish_reason"]
    assert message["content"] == (plain["content"] or "") and (plain["content"] is not None or calls)
    assert message.get("reasoning") == plain.get("reasoning") and message.get("reasoning_content") == plain.get(
        "reasoning"
    )
    assert without_ids(calls) == without_ids(plain.get("tool_calls", []))
    assert len(calls) < 2 or fields == {}


def test_calls_alone_leave_no_content_and_special_markers_are_seen(scripted_http):
    (choice,) = ask(scripted_http, CHAT, **ASKED, **on("b"))["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"] is None
    assert without_ids(choice["message"]["tool_calls"]) == [
        {"type": "function", "function": {"name": "f", "arguments": '{"n":5 }'}}
    ]
    (choice,) = ask(scripted_http, CHAT, **ASKED, **on("b"), return_meta_info=True)["choices"]
    assert choice["message"]["content"] == "" and choice["message"]["tool_calls"][0]["id"].startswith("call_")
    plain = {**ASKED, **on("b"), "tools": None}
    (choice,) = ask(scripted_http, CHAT, **plain)["choices"]
    assert choice["message"]["content"] == '{"name": "f", "arguments": {"n":5 }}' and choice["finish_reason"] == "stop"


def test_a_broken_call_is_content(scripted_http):
    (choice,) = ask(scripted_http, CHAT, **ASKED, **on("c"))["choices"]
    assert choice["message"]["content"] == "".join(SCRIPTS["c"]) and choice["finish_reason"] == "stop"
    (choice,) = ask(scripted_http, CHAT, **{**ASKED, "max_tokens": 8}, **on("a"))["choices"]
    assert choice["message"]["content"] == "Let me see.\n<tool_call>\n" and choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


def test_evidence_is_complete_however_the_text_is_split(scripted_http):
    asked = {**ASKED, "logprobs": True, "return_routed_experts": True, "return_token_ids": True}
    answer = ask(scripted_http, CHAT, **asked)
    (choice,) = answer["choices"]
    num_tokens = answer["usage"]["completion_tokens"]
    assert num_tokens == len(SCRIPTS["a"]) + 1
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*SCRIPTS["a"], "</s>"]
    events = stream(scripted_http, CHAT, **asked, stream_routed_experts=True)
    choices = [event["choices"][0] for event in events]
    assert [i for each in choices for i in each.get("token_ids", [])] == choice["token_ids"]
    entries = [entry for each in choices for entry in (each["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == [*SCRIPTS["a"], "</s>"]
    rows = [extract_routed_experts_from_meta_info(each) for each in choices if "meta_info" in each]
    whole = extract_routed_experts_from_meta_info(choice)
    np.testing.assert_array_equal(np.concatenate([row.reshape(-1) for row in rows]), whole.reshape(-1))


def test_history_and_tools_reach_the_template(scripted_http, scripted):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"n":  5}'}}
    turn = {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]}
    asked = {**ASKED, "messages": [*USER, turn, {"role": "tool", "tool_call_id": "x", "content": "6"}]}

    def prompt(**fields):
        ids = ask(scripted_http, CHAT, **{**asked, **fields}, return_token_ids=True)["prompt_token_ids"]
        return scripted.tokenizer.decode(ids, skip_special_tokens=False)

    turns = 'user: hi</s>assistant: (</think>why)f{"n": 5}</s>tool: 6</s>assistant: a'
    assert prompt(tools=None) == turns
    assert prompt(tool_choice="none") == prompt()
    before, _, rest = prompt().partition(" in <tool_call>")
    assert rest == turns and json.loads(before) == TOOLS


def test_tools_that_may_not_be_called_are_kept_from_the_template_by_a_setting(scripted):
    with served(scripted, exclude_tools_when_tool_choice_none=True) as url, httpx.Client(base_url=url) as http:
        asked = {**ASKED, "return_token_ids": True}
        seen, unseen = (
            ask(http, CHAT, **{**asked, **fields})["prompt_token_ids"] for fields in ({}, {"tool_choice": "none"})
        )
        assert unseen == ask(http, CHAT, **{**asked, "tools": None})["prompt_token_ids"] != seen


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"reasoning_effort": "high"}, "</s>highassistant: a"),
        ({"reasoning_effort": "none"}, "</s>noneoffassistant: a"),
        ({"reasoning_effort": "low", **on("b")}, "</s>lowassistant: b"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "</s>noneassistant: a"),
        ({}, "</s>assistant: a"),
    ],
)
def test_the_effort_reaches_the_template(scripted_http, scripted, fields, end):
    ids = ask(scripted_http, CHAT, **ASKED, **fields, return_token_ids=True)["prompt_token_ids"]
    assert scripted.tokenizer.decode(ids, skip_special_tokens=False).endswith(end)


BOUNDED = {"properties": {"n": {"enum": [5, 7]}}, "required": ["n"], "additionalProperties": False}
CALLABLE = [{"type": "function", "function": {"name": name, "parameters": BOUNDED}} for name in "fg"]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
@pytest.mark.parametrize("script", "ad")
def test_a_call_can_be_demanded_whatever_the_model_would_write(scripted_http, script, choice, finish):
    asked = {**ASKED, **on(script), "tools": CALLABLE, "tool_choice": choice, "parallel_tool_calls": False}
    asked["max_tokens"] = 150
    (answer,) = ask(scripted_http, CHAT, **asked)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == finish and answer["message"]["content"] is None
    assert call["function"]["name"] in ("fg" if choice == "required" else "g")
    assert json.loads(call["function"]["arguments"])["n"] in (5, 7)
    message, calls, streamed_finish = joined(stream(scripted_http, CHAT, **asked))
    assert not message.get("content") and streamed_finish == finish
    assert without_ids(calls) == without_ids([call])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parser", ["glm", "qwen3_coder", "minimax_m2", "openai", "gemma4"])
def test_calls_without_quotes_and_in_channels_can_be_demanded(scripted, parser):
    reasoning = "gpt-oss" if parser == "openai" else "none"
    asked = {**ASKED, "tools": CALLABLE, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150}
    # Rather commentary and final messages than an analysis without an end.
    asked["logit_bias"] = {str(scripted.tokenizer.encode(letter)[-1]): 60 for letter in "cf"}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [57]}}}
    with (
        served(scripted, tool_call_parser=parser, reasoning_parser=reasoning) as url,
        httpx.Client(base_url=url, timeout=600) as http,
    ):
        (answer,) = ask(http, CHAT, **asked)["choices"]
        (constrained,) = ask(http, CHAT, **{**asked, "tool_choice": "auto", "response_format": schema})["choices"]
        unwritable = {**CALLABLE[0]["function"], "parameters": {"properties": {"a": {"not": {}}}}}
        refused = http.post(CHAT, json={**asked, "tools": [{"type": "function", "function": unwritable}]})
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and call["function"]["name"] in "fg"
    assert json.loads(call["function"]["arguments"])["n"] in (5, 7)
    assert constrained["message"]["content"] == "57" and constrained["finish_reason"] == "stop"
    assert check_error(refused, 400)["param"] == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "h"}}, "odd", 5, {"type": "x"}])
def test_a_choice_that_is_none_is_refused(scripted_http, choice):
    error = check_error(scripted_http.post(CHAT, json={**ASKED, "tool_choice": choice}), 400)
    assert "tool_choice" in error["message"]


def test_a_constraint_and_a_demanded_call_exclude_each_other(scripted_http):
    asked = {**ASKED, "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert check_error(scripted_http.post(CHAT, json=asked), 400)["param"] == "response_format"


@pytest.mark.parametrize("tools", ["x", [5], [{"type": "web_search"}], [{"type": "function", "function": {}}]])
def test_tools_are_functions_with_names(scripted_http, tools):
    assert check_error(scripted_http.post(CHAT, json={**ASKED, "tools": tools}), 400)["param"] == "tools"


def test_tools_need_a_parser(scripted):
    with served(scripted, tool_call_parser="none") as url:
        answer = httpx.post(f"{url}{CHAT}", json=ASKED, timeout=600)
    error = check_error(answer, 400)
    assert error["param"] == "tools" and "tool_call_parser" in error["message"]


def test_tools_need_a_template(scripted_http, engine):
    with served(engine, tool_call_parser="hermes") as url:
        answer = httpx.post(f"{url}{CHAT}", json={**ASKED, "model": None}, timeout=600)
    assert "template" in check_error(answer, 400)["message"]
