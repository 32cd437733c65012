"""langchain-openai: chats and responses, whole and streamed, with token counts, objects and tools."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.conftest import client_package

langchain_openai = client_package("langchain_openai")


class Point(BaseModel):
    """A place, small enough for a random model to write within its limit."""

    model_config = ConfigDict(extra="forbid")
    axis: Literal["x", "y"]
    value: int = Field(ge=0, le=99)


class F(BaseModel):
    """A tool that the model of `tool_url` calls."""

    n: int
    s: str


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def tool_model(tool_url: str, request: pytest.FixtureRequest):
    return langchain_openai.ChatOpenAI(
        base_url=f"{tool_url}/v1",
        api_key="EMPTY",
        model="scripted",
        max_tokens=200,
        temperature=0,
        max_retries=0,
        use_responses_api=request.param,
    )


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(url: str, request: pytest.FixtureRequest):
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="EMPTY",
        model="m",
        max_tokens=8,
        temperature=0,
        max_retries=0,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_an_answer_counts_its_tokens(model) -> None:
    answer = model.invoke([("system", "Be brief."), ("human", "Hello")])
    assert 0 < answer.usage_metadata["output_tokens"] <= 8


def test_a_stream_is_the_whole_answer(model) -> None:
    whole = model.invoke("Hello")
    chunks = list(model.stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.text == whole.text and total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_objects_by_a_schema(model) -> None:
    """`json_schema` is the first of the two modes of structured output."""
    typed = model.model_copy(update={"max_tokens": 200}).with_structured_output(Point, method="json_schema")
    assert isinstance(typed.invoke("Where?"), Point)


@pytest.mark.parametrize("strict", [None, True])
def test_objects_by_a_demanded_call(tool_model, strict) -> None:
    """`function_calling` is the other one."""
    typed = tool_model.with_structured_output(Point, method="function_calling", strict=strict)
    assert isinstance(typed.invoke("Where?"), Point)


def test_tools_are_called_whole_and_streamed(tool_model) -> None:
    bound = tool_model.bind_tools([F.model_json_schema() | {"title": "f", "description": "A tool."}])
    whole, chunks = bound.invoke("Where?"), list(bound.stream("Where?"))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    for answer in whole, streamed:
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
            ("f", {"n": 5, "s": "é <b>"}),
            ("g", {}),
        ]
