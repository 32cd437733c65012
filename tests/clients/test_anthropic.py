"""Anthropic's own client: messages, streams and token counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import client_package

anthropic = client_package("anthropic")

ASKED = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = client.messages.create(**ASKED, system="Be brief.", stop_sequences=["\x00"])
    assert message.type == "message" and message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens <= 8 and message.usage.input_tokens > 0


def test_a_stream_adds_up_to_a_message(client: Any) -> None:
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    assert message.stop_reason in ("max_tokens", "end_turn") and message.usage.output_tokens > 0


def test_tokens_are_counted(client: Any) -> None:
    counted = client.messages.count_tokens(model="m", messages=ASKED["messages"])
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_error_is_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASKED | {"model": "another"})
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(**ASKED | {"messages": []})


def test_tools_are_called_whole_and_streamed(tool_url: str) -> None:
    """The model reasons, speaks and calls two tools; calls and results go back in the next turn."""
    user = {"role": "user", "content": "Hello"}
    asked = {"model": "scripted", "max_tokens": 100, "temperature": 0, "tools": TOOLS, "messages": [user]}
    asked = {"extra_body": {"temperature": asked.pop("temperature")}} | asked
    with anthropic.Anthropic(base_url=tool_url, api_key="EMPTY", max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in whole, streamed:
            assert message.stop_reason == "tool_use"
            thinking, text, *calls = message.content
            assert thinking.type == "thinking" and text.text == "Let me see."
            assert [(call.name, call.input) for call in calls] == [("f", {"n": 5, "s": "é <b>"}), ("g", {})]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Bern"} for call in whole.content[2:]]
        history = [user, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        after = client.messages.create(**asked | {"messages": history})
        assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > whole.usage.input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "g"}])
def test_a_call_can_be_demanded(tool_url: str, choice: dict[str, str]) -> None:
    tools = [tool | {"input_schema": {"type": "object", "additionalProperties": False}} for tool in TOOLS]
    with anthropic.Anthropic(base_url=tool_url, api_key="EMPTY", max_retries=0) as client:
        message = client.messages.create(
            **ASKED | {"model": "scripted", "max_tokens": 100}, tools=tools, tool_choice=choice
        )
    (call, *_) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and call.name == choice.get("name", call.name)


def test_a_refusal_is_an_error_that_the_client_reads(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASKED | {"max_tokens": 1000})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error" and "max_tokens" in str(refused.value)
