"""openai's own client: completions, chats and streams, with routing in the fields that it passes through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from rayserve_moe import Engine
from tests.clients.conftest import client_package, decode_int32, uncached_rows

client_package("strands_sglang")

ROUTED = {"return_routed_experts": True, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Where?"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALLS = [("f", {"n": 5, "s": "é <b>"}), ("g", {})]
"""What the model of `tool_client` calls."""


class Point(BaseModel):
    """Small enough for a random model to write within its limit."""

    axis: Literal["x", "y"]
    value: int = Field(ge=0, le=99)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


@pytest.fixture
def tool_client(tool_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_completions_of_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(
        model="m", prompt=[10, 11, 12], max_tokens=5, logprobs=1, n=2, seed=1, extra_body={**ROUTED}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs) == 5
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs)
        rows = decode_int32(choice.model_extra["meta_info"]["routed_experts"])
        assert len(rows) == 3 + 5 - 1
        assert choice.model_extra["sgl_ext"]["routed_experts"] == choice.model_extra["meta_info"]["routed_experts"]
        np.testing.assert_array_equal(rows[:3], uncached_rows(engine, [10, 11, 12, 13]))


def test_a_chat_with_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={**ROUTED},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for position in choice.logprobs.content:
        values = [top.logprob for top in position.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert position.logprob == pytest.approx(values[0], abs=1e-6), "greedy takes the likeliest"
    assert answer.usage is not None
    assert len(decode_int32(choice.model_extra["meta_info"]["routed_experts"])) == answer.usage.total_tokens - 1


def test_a_stream_brings_routing_with_its_last_chunk(client: openai.OpenAI) -> None:
    arguments = {"model": "m", "prompt": [20, 21, 22, 23], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**arguments, extra_body={**ROUTED})
    chunks = list(
        client.completions.create(
            **arguments, extra_body={**ROUTED}, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    with_routing = [choice for choice in choices if (choice.model_extra or {}).get("meta_info")]
    assert [choice.finish_reason for choice in with_routing] == ["length"]
    assert with_routing[0].model_extra["meta_info"] == whole.choices[0].model_extra["meta_info"] | {
        "routed_experts_info": with_routing[0].model_extra["meta_info"]["routed_experts_info"]
    }


def test_responses_whole_streamed_and_continued(client: openai.OpenAI) -> None:
    asked = {"model": "m", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert final.output_text == text == whole.output_text and final.usage is not None
    after = client.responses.create(**asked | {"input": "And?"}, previous_response_id=whole.id)
    assert after.usage is not None and after.usage.input_tokens > final.usage.input_tokens


@pytest.mark.parametrize("seed", range(3))
def test_objects_are_parsed(client: openai.OpenAI, seed: int) -> None:
    asked = {"model": "m", "messages": MESSAGES, "seed": seed, "max_tokens": 200}
    (choice,) = client.chat.completions.parse(response_format=Point, **asked).choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Point)
    with client.chat.completions.stream(response_format=Point, **asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.parsed == choice.message.parsed


def test_responses_are_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": "m", "input": "Where?", "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.parse(text_format=Point, **asked)
    assert whole.status == "completed" and isinstance(whole.output_parsed, Point)
    with client.responses.stream(text_format=Point, **asked) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_tools_are_called_whole_and_streamed(tool_client: openai.OpenAI) -> None:
    asked = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    (choice,) = tool_client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    with tool_client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    for one in choice, streamed:
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in one.message.tool_calls]
        assert calls == CALLS


def test_responses_call_tools_whole_and_streamed(tool_client: openai.OpenAI) -> None:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    asked = {"model": "scripted", "input": "Where?", "tools": tools, "temperature": 0}
    with tool_client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in tool_client.responses.create(**asked), streamed:
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in response.output[2:]] == CALLS
