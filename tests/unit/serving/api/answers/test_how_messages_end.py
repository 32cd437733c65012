"""No dialect tells an answer that was cut off, or could not go on, as one that has ended by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.routes.messages import MessagesWriter
from rayserve_moe.serving.api.routes.responses import ResponsesWriter
from rayserve_moe.serving.api.schemas.responses import ResponsesBody

ERROR = {"message": "nothing may follow", "type": "invalid_request_error", "param": "regex"}
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 1,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
REQUEST: Any = SimpleNamespace(prompt_ids=np.array([5, 6], np.int32))


class Chat:
    """The answer of a chat whose only choice ends like this."""

    routing = None

    def __init__(self, kind: str) -> None:
        self._end = {"logprobs": None, "finish_reason": kind, "stop_reason": None}
        self._end |= {"error": ERROR} if kind == "error" else {}

    def whole(self, results: Any) -> dict:
        return {"choices": [{"index": 0, "message": {"content": "a"}, **self._end}], "usage": USAGE}

    def chunks(self, choice: int, so_far: Any, *, delta: Any) -> list[dict]:
        return [{"choices": [{"index": 0, "delta": {"content": "a"}, **self._end}]}]

    def usage(self, results: Any) -> dict:
        return USAGE


def message_writer(kind: str) -> MessagesWriter:
    chat: Any = Chat(kind)
    return MessagesWriter(chat, REQUEST, model="m")


def response_writer(kind: str) -> ResponsesWriter:
    chat: Any = Chat(kind)
    return ResponsesWriter(chat, body=ResponsesBody(input="x"), model="m", keep=lambda _: None)


def told(writer: Callable[[str], Any], kind: str) -> tuple[dict, list[dict]]:
    """The whole answer that ends like this, and its last events."""
    streaming, result = writer(kind), ChoiceResult()
    events = [*streaming.chunks(0, result, delta=result), *streaming.closing([result])]
    return writer(kind).whole([result]), events


@pytest.mark.parametrize(
    ("kind", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("abort", "abort"), ("error", "error")]
)
def test_a_message_says_why_it_has_ended(kind: str, reason: str) -> None:
    whole, events = told(message_writer, kind)
    delta = events[-2]["delta"]
    assert whole["stop_reason"] == delta["stop_reason"] == reason
    assert whole.get("error") == delta.get("error") == (ERROR if kind == "error" else None)


@pytest.mark.parametrize(
    ("kind", "status", "event"),
    [
        ("stop", "completed", "completed"),
        ("length", "incomplete", "incomplete"),
        ("abort", "cancelled", "completed"),
        ("error", "failed", "failed"),
    ],
)
def test_a_response_says_whether_it_is_complete(kind: str, status: str, event: str) -> None:
    whole, events = told(response_writer, kind)
    assert events[-1]["type"] == f"response.{event}"
    for response in (whole, events[-1]["response"]):
        assert response["status"] == status
        wanted = {"code": "invalid_prompt", "message": ERROR["message"]} if kind == "error" else None
        assert response["error"] == wanted
