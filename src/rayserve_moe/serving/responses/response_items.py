"""Items of a response: reasoning, messages and calls, whole and as the events that build them up."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}


def items_of(message: dict, logprobs: dict | None) -> list[dict]:
    """Return the items of a whole message of a chat."""
    events = ItemEvents()
    delta = {name: message.get(name) for name in ("reasoning", "content", "tool_calls")}
    for _ in (*events.of_delta({k: v for k, v in delta.items() if v}, logprobs), *events.closed()):
        continue
    return events.items()


class ItemEvents:
    """Turns deltas of a chat into events.

    Log-probs go with the text that comes next or last; of the whole response all are the first message's.
    """

    def __init__(self) -> None:
        self._finished: list[dict] = []
        self._item: dict[str, Any] | None = None
        self._logprobs: list[dict] = []

    def items(self) -> list[dict]:
        """Return the items that have ended."""
        if first := next((item for item in self._finished if item["type"] == "message"), None):
            first["content"][0]["logprobs"] = self._logprobs
        return self._finished

    def of_delta(self, delta: dict, logprobs: dict | None) -> Iterator[dict]:
        """Return the events of one delta."""
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
        """End the item that is open, if there is one."""
        if (item := self._item) is None:
            return
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._event("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"response.{_PART[item['type']]}.done", content_index=0, text=part["text"], **more)
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
        more = {"logprobs": logprobs} if kind == "message" else {}
        if kind == "message":
            part["logprobs"] = part["logprobs"] + logprobs
        yield self._event(f"response.{_PART[kind]}.delta", content_index=0, delta=text, **more)

    def _begun(self, kind: str, fields: dict) -> dict:
        item = {"type": kind, "id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self._item = item
        empty = {} if kind == "function_call" else {"content": []}
        return {"type": "response.output_item.added", "output_index": len(self._finished), "item": {**item, **empty}}

    def _event(self, kind: str, **fields: Any) -> dict:
        assert self._item is not None, "an event of an item has one"
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self._finished), **fields}
