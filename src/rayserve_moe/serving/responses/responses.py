"""Answers of `/v1/responses`, from those of a chat: one object, or events that build it up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.responses.openai import OpenAIWriter
from rayserve_moe.serving.responses.response_items import ItemEvents, items_of
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.schemas.responses import ResponsesBody

_STATUS = {"length": "incomplete", "abort": "cancelled", "error": "failed"}


class ResponsesWriter:
    """Writes one response; `keep` is called with it once it is complete."""

    def __init__(
        self,
        chat: OpenAIWriter,
        request: GenerationRequest,
        *,
        body: ResponsesBody,
        model: str,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._chat, self._request, self._keep = chat, request, keep
        self._envelope = _envelope(body, model)
        self._items: ItemEvents | None = None
        self._finish, self._error = "", None
        self._number = 0

    @property
    def routing(self) -> RoutingWriter:
        """The chat's."""
        return self._chat.routing

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the response."""
        answer = self._chat.whole(results)
        (choice,) = answer["choices"]
        self._note_end(choice)
        return self._ended(items_of(choice["message"], choice["logprobs"]), answer["usage"])

    def defers(self, delta: ChoiceResult) -> bool:
        """No event waits."""
        return False

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the events of new output."""
        events: list[dict] = []
        if self._items is None:
            self._items = ItemEvents()
            started = {**self._envelope, "status": "in_progress", "output": [], "usage": None}
            events = [{"type": f"response.{name}", "response": started} for name in ("created", "in_progress")]
        for chunk in self._chat.chunks(choice, so_far, delta=delta):
            for part in chunk["choices"]:
                events += self._items.of_delta(part["delta"], part["logprobs"])
                self._note_end(part)
        return list(self._numbered(events))

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """Return the end of the last item, and the response."""
        assert self._items is not None, "an answer ends after it has begun"
        events = list(self._items.closed())
        response = self._ended(self._items.items(), self._chat.usage(results))
        kind = {"cancelled": "completed"}.get(response["status"], response["status"])
        return list(self._numbered([*events, {"type": f"response.{kind}", "response": response}]))

    def _note_end(self, choice: dict) -> None:
        self._finish = choice["finish_reason"] or self._finish
        self._error = choice.get("error", self._error)

    def _ended(self, output: list[dict], usage: dict) -> dict:
        status = _STATUS.get(self._finish, "completed")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {**self._envelope, "status": status, "incomplete_details": details, "output": output}
        response["usage"] = _usage(usage)
        if self._error is not None:
            response["error"] = {"code": "invalid_prompt", "message": self._error["message"]}
        if self._envelope["store"]:
            self._keep(response)
        return response

    def _numbered(self, events: Sequence[dict]) -> Iterator[dict]:
        for event in events:
            yield {"type": event.pop("type"), "sequence_number": self._number, **event}
            self._number += 1


def _envelope(body: ResponsesBody, model: str) -> dict[str, Any]:
    return {
        "id": body.request_id or f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning,
        "service_tier": "default",
        "store": body.store,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage: dict) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
