"""Routes `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect over this server's chats.

Answers are converted from chat answers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.answering import Writer, respond
from rayserve_moe.serving.api.answers.openai import OpenAIWriter, usage_of
from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.api.routes.chat_prompt import chat_ids
from rayserve_moe.serving.api.routes.openai import opened_chat
from rayserve_moe.serving.api.routes.request_parts import check_model
from rayserve_moe.serving.api.schemas.messages import CHAT_NAMES, CountTokensBody, MessagesBody, chat_fields
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.middleware.json_body import chat_from, read_body, refusals_translated
from rayserve_moe.serving.openapi import GENERATION, generates, takes

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "abort", "error": "error"}
"""Stop reasons by finish reason, except `stop`. A truncated message is not reported as complete."""
_EMPTY = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def messages_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.post("/v1/messages", **generates(MessagesBody))
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody, admission=state.admission)
        check_model(state, body.model)
        streams, inner = await opened_chat(state, request, fields=partial(chat_fields, body), names=CHAT_NAMES)
        writer = MessagesWriter(inner, streams.request_of_choice[0], model=state.card.name)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream)

    @router.post("/v1/messages/count_tokens", **takes(CountTokensBody, *GENERATION))
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensBody, admission=state.admission)
        check_model(state, body.model)
        with refusals_translated(CHAT_NAMES):
            ids = await chat_ids(state, chat_from(chat_fields(body)), request=request)
        return json_answer({"input_tokens": len(ids)})

    return router


class MessagesWriter(Writer):
    """Writer of a message: blocks of thinking, text and tool use, whole or as events."""

    has_types = True

    def __init__(self, chat: OpenAIWriter, request: GenerationRequest, *, model: str) -> None:
        self._chat, self._request = chat, request
        self.routing = chat.routing
        self._has_begun, self._has_called, self._block, self._num_blocks = False, False, "", 0
        self._message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._stop: dict[str, Any] = {}

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the message."""
        answer = self._chat.whole(results)
        (choice,) = answer["choices"]
        content = list(_blocks_of(choice["message"]))
        stop = _stop_of(choice, has_called="tool_calls" in choice["message"])
        return {**self._message, "content": content, **stop, "usage": _usage(answer["usage"])}

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the events of new output."""
        events: list[dict] = []
        for chunk in self._chat.chunks(choice, so_far, delta=delta):
            for part in chunk["choices"]:
                events += self._events_of(part)
        if not self._has_begun:
            self._has_begun = True
            events.insert(0, self._opening(so_far))
        return events

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """Return the events after the last block's last delta."""
        usage = _usage(usage_of([self._request], results))
        changed = {"type": "message_delta", "delta": self._stop, "usage": usage}
        return [*self._closed(), changed, {"type": "message_stop"}]

    def _opening(self, so_far: ChoiceResult) -> dict:
        started = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(usage_of([self._request], [so_far])) | {"output_tokens": 0}
        return {"type": "message_start", "message": {**started, "usage": usage}}

    def _events_of(self, choice: dict) -> Iterator[dict]:
        delta = choice["delta"]
        if thought := delta.get("reasoning"):
            yield from self._opened("thinking", _EMPTY["thinking"])
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._opened("text", _EMPTY["text"])
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                self._has_called = True
                yield from self._closed()
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._opened("tool_use", block)
            if function.get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        if choice.get("finish_reason"):
            self._stop = _stop_of(choice, has_called=self._has_called)

    def _opened(self, kind: str, block: dict) -> Iterator[dict]:
        if self._block != kind:
            yield from self._closed()
            self._block = kind
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _closed(self) -> Iterator[dict]:
        if not self._block:
            return
        if self._block == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature()})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._block, self._num_blocks = "", self._num_blocks + 1

    def _delta(self, delta: dict) -> dict:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _blocks_of(message: dict) -> Iterator[dict]:
    if thought := message.get("reasoning"):
        yield {"type": "thinking", "thinking": thought, "signature": _signature()}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _object(function["arguments"])}


def _object(arguments: str) -> dict:
    read = json.loads(arguments or "{}")
    return read if isinstance(read, dict) else {"arguments": read}


def _signature() -> str:
    """Return a random signature, which clients require; it proves nothing."""
    return uuid.uuid4().hex


def _stop_of(choice: dict, *, has_called: bool) -> dict[str, Any]:
    """Return the end of a message: `tool_use` also after a forced call, which a chat ends by `stop`."""
    matched = choice["stop_reason"] if choice["finish_reason"] == "stop" else None
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    is_call = has_called and choice["finish_reason"] == "stop"
    reason = "tool_use" if is_call else _REASONS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": None, **({"error": choice["error"]} if "error" in choice else {})}


def _usage(usage: dict) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
