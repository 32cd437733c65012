"""Anthropic's `/v1/messages` and OpenAI's `/v1/responses`: what a chat answers, in other forms, whole and streamed."""

from __future__ import annotations

import json

import httpx
import pytest

from rayserve_moe.requests.fields import OPENAI, declared
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.serving.api.schemas.messages import MessagesBody
from rayserve_moe.serving.api.schemas.responses import ResponsesBody
from rayserve_moe.serving.response_store import ResponseStore
from tests.http.conftest import served
from tests.http.test_tools import TOOLS, USER
from tests.support.models.scripted import FIRST_ID, MODEL, SCRIPTS
from tests.support.serving.dialects import typed_events
from tests.support.serving.http_client import CHAT, MESSAGES, RESPONSES, ask, check_error

THEIR_TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in "fg"]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC = {"model": MODEL, "messages": USER, "max_tokens": 30, "temperature": 0, "tools": THEIR_TOOLS}
ASKED = {"model": MODEL, "input": "hi", "max_output_tokens": 30, "temperature": 0, "tools": FLAT_TOOLS}


def without(value, *names):
    """The value without these fields at any depth."""
    if isinstance(value, list):
        return [without(each, *names) for each in value]
    if isinstance(value, dict):
        return {name: without(each, *names) for name, each in value.items() if name not in names}
    return value


def test_a_message_has_thinking_text_and_tool_use(scripted_http):
    answer = ask(scripted_http, MESSAGES, **ANTHROPIC)
    thinking, text, *calls = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I need f.") and thinking["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "f", {"n": 5, "s": "é <b>"}),
        ("tool_use", "g", {}),
    ]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "tool_use")
    assert answer["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_dialect_calls_tools_that_may_not_be_called(scripted_http, script):
    choice = {"chat_template_kwargs": {"script": script}}
    message = ask(scripted_http, MESSAGES, **ANTHROPIC, **choice, tool_choice={"type": "none"})
    response = ask(scripted_http, RESPONSES, **ASKED, **choice, tool_choice="none")
    assert {block["type"] for block in message["content"]} <= {"thinking", "text"}
    assert {item["type"] for item in response["output"]} <= {"reasoning", "message"}
    assert message["stop_reason"] == "end_turn" and response["status"] == "completed"
    asked = {name: ANTHROPIC[name] for name in ("model", "messages", "tools")}
    counts = [
        ask(scripted_http, f"{MESSAGES}/count_tokens", **asked, tool_choice={"type": kind})["input_tokens"]
        for kind in ("none", "auto")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "g"}])
def test_a_message_whose_call_was_demanded_has_stopped_for_it(scripted_http, choice):
    tools = [tool | {"input_schema": {"type": "object", "additionalProperties": False}} for tool in THEIR_TOOLS]
    body = ANTHROPIC | {"tools": tools, "tool_choice": choice, "max_tokens": 100}
    answer = ask(scripted_http, MESSAGES, **body)
    assert answer["stop_reason"] == answer["content"][-1]["type"] == "tool_use"
    assert typed_events(scripted_http, MESSAGES, **body)[-2]["delta"] == {
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }


def test_both_events_of_a_stream_count_a_cached_prompt_alike(scripted_http):
    body = ANTHROPIC | {"messages": [{"role": "user", "content": "a long prompt " * 10}]}
    ask(scripted_http, MESSAGES, **body)
    events = typed_events(scripted_http, MESSAGES, **body)
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert ended["cache_read_input_tokens"] > 0 and begun == ended | {"output_tokens": 0}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_streamed_message_is_the_whole_one(scripted_http, script):
    body = ANTHROPIC | {"system": "", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    whole = ask(scripted_http, MESSAGES, **body)
    events = typed_events(scripted_http, MESSAGES, **body)
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        *("message_start", "message_delta", "message_stop")
    ]
    message, is_open = events[0]["message"], False
    assert message["type"] == "message" and message["role"] == "assistant"
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
            is_open = True
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(message["content"]) - 1
            is_open = False
        else:
            (_, kind), (name, value) = event["delta"].items()
            block = message["content"][event["index"]]
            name = "json" if kind == "input_json_delta" else name
            block[name] = block.get(name, "") + value
    for block in message["content"]:
        spoken = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(spoken)
    message |= events[-2]["delta"]
    assert not is_open and events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert without(message, "id", "signature", "usage") == without(whole, "id", "signature", "usage")


def test_tokens_are_counted_as_the_chat_counts_them(scripted_http):
    counted = ask(scripted_http, f"{MESSAGES}/count_tokens", model=MODEL, messages=USER, tools=THEIR_TOOLS)
    assert counted == {"input_tokens": ask(scripted_http, CHAT, messages=USER, tools=TOOLS)["usage"]["prompt_tokens"]}


def test_a_last_message_of_the_assistant_is_gone_on_with(scripted_http):
    begun = [*USER, {"role": "assistant", "content": "Let me"}]
    chat = {"messages": begun, "max_tokens": 1, "continue_final_message": True}
    answer = ask(scripted_http, MESSAGES, model=MODEL, messages=begun, max_tokens=1)
    counted = scripted_http.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, "messages": begun}).json()
    assert (
        answer["usage"]["input_tokens"] + answer["usage"].get("cache_read_input_tokens", 0) == counted["input_tokens"]
    )
    assert counted["input_tokens"] == ask(scripted_http, CHAT, **chat)["usage"]["prompt_tokens"]
    for text in ("", []):
        ended = [*USER, {"role": "assistant", "content": text}]
        closed = scripted_http.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, "messages": ended}).json()
        chat = {"messages": [*USER, {"role": "assistant", "content": ""}], "max_tokens": 1}
        assert closed["input_tokens"] == ask(scripted_http, CHAT, **chat)["usage"]["prompt_tokens"]


def test_history_reaches_the_template(scripted_http):
    history = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "w", "signature": "x"},
                {"type": "thinking", "thinking": "h", "signature": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "7"}]},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "be"},
        history[0],
        {"role": "assistant", "content": "so", "reasoning_content": "w\nh", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    wanted = ask(scripted_http, "/tokenize", messages=chat)["count"]
    assert ask(scripted_http, f"{MESSAGES}/count_tokens", messages=history, system="be") == {"input_tokens": wanted}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "summary": []} for text in "wh"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ]
    answer = ask(scripted_http, RESPONSES, input=items, instructions="be", max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == wanted


def test_several_texts_of_a_message_are_its_parts(scripted_http):
    """Check that the template joins parts, that parts of a result are lines, and that empty parts are left out."""
    texts = ("be brief", "be kind")
    parts = [{"type": "text", "text": text} for text in texts]
    spoken = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "\n".join(texts)},
    ]
    chat = [{"role": "system", "content": parts}, *spoken, *called]
    wanted = ask(scripted_http, "/tokenize", messages=chat)["count"]
    messages = [
        *({**message, "content": [*parts, {"type": "text", "text": ""}]} for message in spoken),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": parts}]},
    ]
    assert ask(scripted_http, f"{MESSAGES}/count_tokens", messages=messages, system=parts) == {"input_tokens": wanted}
    items = [
        *({"role": message["role"], "content": message["content"]} for message in (chat[0], *spoken)),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    answer = ask(scripted_http, RESPONSES, input=items, max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == wanted


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text"),
        (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "role"),
        (MESSAGES, {"messages": [{"role": "user", "content": 7}]}, "content"),
        (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
        (MESSAGES, {"thinking": {"type": "sometimes"}}, "thinking"),
        (MESSAGES, {"temperature": 3}, "temperature"),
        (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"include": ["file_search_call.results"]}, "include"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"top_p": "x"}, "top_p"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripted_http, path, fields, named):
    body = (ANTHROPIC if path == MESSAGES else ASKED) | fields
    assert named in check_error(scripted_http.post(path, json=body), 400)["message"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        (MESSAGES, {"output_config": {"format": {"type": "some"}}}, "output_config.format"),
        (MESSAGES, {"output_config": {"effort": "some"}}, "output_config.effort"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {"max_tokens": 10**6}, "max_tokens"),
        (f"{MESSAGES}/count_tokens", {"max_tokens": None, "output_config": {"effort": "some"}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": "some"}}, "reasoning.effort"),
        (RESPONSES, {"text": {"format": {"type": "some"}}}, "text.format"),
        (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens"),
        (RESPONSES, {"input": "x" * 2000}, "input"),
        (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}, "input.0"),
        (RESPONSES, {"input": [{"type": "reasoning", "content": [5]}]}, "input.0"),
        (RESPONSES, {"tools": None, "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tools": None, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        (RESPONSES, {"tools": None, "tool_choice": 5}, "tool_choice"),
        (MESSAGES, {"tools": None, "tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tools": None, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": ["any"]}}, "tool_choice"),
        (RESPONSES, {"request_id": ""}, "request_id"),
        (RESPONSES, {"stop": ""}, "stop"),
    ],
)
def test_a_field_is_refused_under_the_name_that_it_was_given(scripted_http, path, fields, named):
    asked = ASKED if path == RESPONSES else ANTHROPIC
    body = {name: value for name, value in (asked | fields).items() if value is not None}
    error = check_error(scripted_http.post(path, json=body), 400)
    assert error["param"] == named and f"`{named}" in error["message"], error


def test_every_refusal_has_the_form_of_its_dialect(scripted):
    with (
        served(scripted, api_key="k", max_body_bytes=100) as url,
        httpx.Client(base_url=url, headers={"x-api-key": "k", "authorization": "Bearer k"}) as http,
    ):
        check_error(http.post(MESSAGES, json=ANTHROPIC, headers={"authorization": "Bearer other"}), 401)
        for path in (MESSAGES, RESPONSES):
            check_error(http.post(path, content=b" " * 101), 413)
            check_error(http.post(path, content=iter([b" " * 60] * 2)), 413)
            check_error(http.post(path, content=b"{"), 400)
            check_error(http.put(path, json={}), 405)
            check_error(http.get(f"{path}/none/such"), 404)


def test_a_response_has_items_in_order(scripted_http):
    answer = ask(scripted_http, RESPONSES, **ASKED, metadata={"a": "b"})
    reasoning, message, *calls = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I need f."}]
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"n": 5, "s": "é <b>"}'), ("g", "{}")]
    assert answer["status"] == "completed" and answer["metadata"] == {"a": "b"}
    cut = ask(scripted_http, RESPONSES, **ASKED | {"max_output_tokens": 3})
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_events_build_up_the_response(scripted_http, script):
    body = ASKED | {"chat_template_kwargs": {"script": script}, "include": ["message.output_text.logprobs"]}
    events = typed_events(scripted_http, RESPONSES, **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1]["response"]
    assert without(response, "id", "created_at", "call_id", "usage") == without(
        ask(scripted_http, RESPONSES, **body), *("id", "created_at", "call_id", "usage")
    )
    open_items, texts = [], {}
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(open_items) and event["item"]["status"] == "in_progress"
            open_items.append(event["item"]["id"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_items[-1]
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind == "output_item.done":
            item = event["item"]
            spoken = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts.get(item["id"], "") == spoken
            assert without(item, "logprobs") == without(response["output"][event["output_index"]], "logprobs")


def test_a_response_continues_another(scripted_http, scripted_client):
    first = scripted_client.responses.create(model=MODEL, input="hi", temperature=0, max_output_tokens=9)
    assert scripted_client.responses.retrieve(first.id).output_text == first.output_text
    second = scripted_client.responses.create(
        model=MODEL, input="more", previous_response_id=first.id, temperature=0, max_output_tokens=2
    )
    message = {"role": "assistant", "content": first.output_text}
    if reasoning := [part.text for item in first.output if item.type == "reasoning" for part in item.content]:
        message["reasoning_content"] = reasoning[0]
    history = [USER[0], message, {"role": "user", "content": "more"}]
    assert second.usage.input_tokens == ask(scripted_http, "/tokenize", messages=history)["count"]
    scripted_client.responses.delete(first.id)
    body = {"input": "x", "previous_response_id": first.id}
    assert check_error(scripted_http.post(RESPONSES, json=body), 404)["param"] == "previous_response_id"
    unkept = scripted_client.responses.create(model=MODEL, input="x", max_output_tokens=1, store=False)
    assert check_error(scripted_http.get(f"{RESPONSES}/{unkept.id}"), 404)["param"] == "response_id"


def test_the_openai_package_reads_the_stream(scripted_client):
    with scripted_client.responses.stream(model=MODEL, input="hi", temperature=0, max_output_tokens=30) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed"
    assert final.output_text.startswith("Let me see.")


def test_stored_responses_take_bounded_memory():
    store = ResponseStore(max_bytes=400)
    for number in range(9):
        store.put({"id": str(number), "text": "x" * 50}, [{"role": "user", "content": "y" * 20}])
    assert store.get("8") is not None and store.get("0") is None
    kept = [store.get(str(number)) for number in range(9)]
    assert sum(found.num_bytes for found in kept if found) <= 400 and sum(map(bool, kept)) >= 2
    store.put({"id": "large", "text": "x" * 500}, [])
    assert store.get("large") is None


def test_sampling_parameters_of_chats_are_those_of_both_dialects(scripted_http):
    of_chats = {field.names[OPENAI] for field in declared(SamplingParams) if OPENAI in field.names}
    own_names, see = {"n", "max_tokens"}, SCRIPTS["a"].index(" see.")
    assert of_chats - own_names <= set(ResponsesBody.model_fields)
    assert of_chats - own_names - {"stop"} <= set(MessagesBody.model_fields)
    for path, body in ((MESSAGES, ANTHROPIC), (RESPONSES, ASKED)):
        assert check_error(scripted_http.post(path, json=body | {"min_p": 2}), 400)["param"] == "min_p"
        stopped = json.dumps(ask(scripted_http, path, **body | {"stop_token_ids": [FIRST_ID + see]}))
        assert "Let me" in stopped and "see" not in stopped
