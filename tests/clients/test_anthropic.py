"""Anthropic's own client: messages, streams and token counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import client_package

anthropic = client_package("anthropic")

ASKED = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}


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
