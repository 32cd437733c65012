"""Route `/v1/responses`: OpenAI's newer dialect over this server's chats, whose answers become its items.

Responses are kept in bounded memory by the replica that answered; every replica finds them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.answering import Writer, respond
from rayserve_moe.serving.api.answers.openai import OpenAIWriter
from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.api.routes.openai import opened_chat
from rayserve_moe.serving.api.routes.request_parts import check_model
from rayserve_moe.serving.api.schemas.responses import CHAT_NAMES, ResponsesBody, chat_fields, messages_of
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import READ_S, Fleet, values_of
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import answers, generates, named_in_path
from rayserve_moe.serving.response_store import StoredResponse

_ID = named_in_path("response_id")
_STATUS = {"length": "incomplete", "abort": "cancelled", "error": "failed"}
_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}


def responses_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.post("/v1/responses", **generates(ResponsesBody))
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, admission=state.admission)
        check_model(state, body.model)
        before = body.previous_response_id
        earlier = () if before is None else (await _stored(state, before, param="previous_response_id")).messages
        messages = [*earlier, *messages_of(body.input)]
        fields = partial(chat_fields, body, messages)
        streams, inner = await opened_chat(state, request, fields=fields, names=CHAT_NAMES)

        def keep(answer: dict[str, Any]) -> None:
            state.responses.put(answer, [*messages, *messages_of(answer["output"] or "")])

        writer = ResponsesWriter(inner, body=body, model=state.card.name, keep=keep)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream)

    @router.get("/v1/responses/{response_id}", **answers(404), openapi_extra=_ID)
    async def response(request: Request) -> Response:
        return json_answer((await _stored(state, request.path_params["response_id"], param="response_id")).answer)

    @router.delete("/v1/responses/{response_id}", **answers(404), openapi_extra=_ID)
    async def forget(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if not any(await Fleet(state).every("forget_response", response_id, timeout_s=READ_S)):
            raise _unknown("response_id")
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    return router


async def _stored(state: ApiState, response_id: str, *, param: str) -> StoredResponse:
    """Return a response stored by this replica, else by any other.

    Raises: ApiError 404 if it was not stored or has been evicted, 503 if a replica that may have it does not answer.
    """
    if (found := state.responses.get(response_id)) is not None:
        return found
    answers = await Fleet(state).call("stored_response", response_id)
    if (found := next((one for one in answers.values if one is not None), None)) is not None:
        return found
    values_of(answers)
    raise _unknown(param)


def _unknown(param: str) -> ApiError:
    message = "no such response is stored: it may have made way for later ones"
    return ApiError(404, message, param=param, code="response_not_found")


class ResponsesWriter(Writer):
    """Writer of a response; it passes the complete response to `keep`."""

    has_types = True

    def __init__(
        self, chat: OpenAIWriter, *, body: ResponsesBody, model: str, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self._chat, self._keep, self.routing = chat, keep, chat.routing
        self._envelope = _envelope(body, model)
        self._items: ItemEvents | None = None
        self._finish, self._error = "", None
        self._number = 0

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the response."""
        answer = self._chat.whole(results)
        (choice,) = answer["choices"]
        self._note_end(choice)
        return self._ended(items_of(choice["message"], choice["logprobs"]), answer["usage"])

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
    fields = dict(body)
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
        "temperature": 1.0 if fields["temperature"] is None else fields["temperature"],
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if fields["top_p"] is None else fields["top_p"],
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


def items_of(message: dict, logprobs: dict | None) -> list[dict]:
    """Return the items of a whole chat message."""
    events = ItemEvents()
    delta = {name: message.get(name) for name in ("reasoning", "content", "tool_calls")}
    for _ in (*events.of_delta({k: v for k, v in delta.items() if v}, logprobs), *events.closed()):
        continue
    return events.items()


class ItemEvents:
    """Converter of chat deltas to events.

    Log-probs accompany the next or last text; in the whole response all belong to the first message.
    """

    def __init__(self) -> None:
        self._finished: list[dict] = []
        self._item: dict[str, Any] | None = None
        self._logprobs: list[dict] = []

    def items(self) -> list[dict]:
        """Return the completed items."""
        if first := next((item for item in self._finished if item["type"] == "message"), None):
            first["content"][0]["logprobs"] = self._logprobs
        return self._finished

    def of_delta(self, delta: dict, logprobs: dict | None) -> Iterator[dict]:
        """Return the events of a delta."""
        new = [] if logprobs is None else logprobs["content"]
        self._logprobs += new
        if thought := delta.get("reasoning"):
            yield from self._text("reasoning", thought, [])
        if text := delta.get("content"):
            yield from self._text("message", text, new)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield from self.closed()
                named = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield self._begun("function_call", named)
            if arguments := function.get("arguments"):
                assert self._item is not None, "arguments follow a call's name"
                self._item["arguments"] += arguments
                yield self._event("response.function_call_arguments.delta", delta=arguments)

    def closed(self) -> Iterator[dict]:
        """Return the events that end the open item, if any."""
        if (item := self._item) is None:
            return
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._event("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            event = self._event(f"response.{_PART[item['type']]}.done", content_index=0, text=part["text"])
            if item["type"] == "message":
                event["logprobs"] = part["logprobs"]
            yield event
            if item["type"] == "message":
                yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = "completed"
        done = {"type": "response.output_item.done", "output_index": len(self._finished), "item": item}
        self._finished.append(item)
        self._item = None
        yield done

    def _text(self, kind: str, text: str, logprobs: list[dict]) -> Iterator[dict]:
        if self._item is None or self._item["type"] != kind:
            yield from self.closed()
            yield self._begun(kind, {"role": "assistant"} if kind == "message" else {"summary": []})
            assert self._item is not None, "an item has just begun"
            part: dict[str, Any] = {"type": _PART[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                yield self._event("response.content_part.added", content_index=0, part=dict(part))
            self._item["content"] = [part]
        (part,) = self._item["content"]
        part["text"] += text
        event = self._event(f"response.{_PART[kind]}.delta", content_index=0, delta=text)
        if kind == "message":
            part["logprobs"] = part["logprobs"] + logprobs
            event["logprobs"] = logprobs
        yield event

    def _begun(self, kind: str, fields: dict) -> dict:
        item = {"type": kind, "id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self._item = item
        empty = {} if kind == "function_call" else {"content": []}
        return {"type": "response.output_item.added", "output_index": len(self._finished), "item": {**item, **empty}}

    def _event(self, kind: str, **fields: Any) -> dict:
        assert self._item is not None, "an event of an item has one"
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self._finished), **fields}
