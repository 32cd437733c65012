"""Parts of a chat answer: reasoning, content and calls, whole and as deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.serving.api.schemas.openai import ChatBody
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tool_calls.splitter import OutputSplitter
from rayserve_moe.text.tool_calls.tape import Part, TextPart, ToolCall


class ChatParts:
    """Splitter of the texts of all choices of a chat; `is_active` is False if they are content only.

    If the model can reason, a message has the same `reasoning` and `reasoning_content`.
    """

    def __init__(self, output: ChatOutput, body: ChatBody, *, request_of_choice: Sequence[GenerationRequest]) -> None:
        self._body, self._format = body, output.format
        asked = asked_parts(body)
        self._splitters = [
            output.splitter(
                request.prompt_ids,
                tools=body.offered_tools,
                max_calls=None if body.parallel_tool_calls else 1,
                **asked,
            )
            for request in request_of_choice
        ]
        self.is_active = any(self._splitters)
        self._has_reasoning = asked["has_reasoning"] and output.format.reasoning is not None and body.include_reasoning
        self._num_calls = [0] * len(self._splitters)
        self._held_reasoning = [""] * len(self._splitters)

    def message(self, choice: int, text: str, *, echoed: str = "") -> dict:
        """Return the fields of a whole message except its role; content is null if the message has only calls.

        In SGLang's dialect, selected by `return_meta_info`, it is empty instead.
        """
        parts = [*self._splitter(choice).push(text), *self._splitter(choice).finish()]
        content = echoed + _joined(parts, "content")
        reasoning = _joined(parts, "reasoning") or None
        calls = [self._written(choice, part, whole=True) for part in parts if isinstance(part, ToolCall)]
        return {
            "content": None if calls and not content and not self._body.return_meta_info else content,
            "refusal": None,
            **({"reasoning": reasoning, "reasoning_content": reasoning} if self._has_reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def deltas(self, choice: int, text: str, *, is_last: bool) -> list[dict]:
        """Return the deltas for new text; a call makes two, with name and id, and with arguments."""
        splitter = self._splitter(choice)
        parts = [*splitter.push(text), *(splitter.finish() if is_last else [])]
        return [delta for part in self._released(choice, parts, is_last) for delta in self._deltas_of(choice, part)]

    def has_calls(self, choice: int) -> bool:
        """Return True if a choice has called a tool."""
        return self._num_calls[choice] > 0

    def _splitter(self, choice: int) -> OutputSplitter:
        splitter = self._splitters[choice]
        assert splitter is not None, "parts of an answer that has none"
        return splitter

    def _released(self, choice: int, parts: Sequence[Part], is_last: bool) -> Iterator[Part]:
        """Yield parts as the client requests them: without reasoning, or with all reasoning at once."""
        for part in parts:
            if not isinstance(part, TextPart) or part.kind == "content":
                yield from self._taken_reasoning(choice)
                yield part
            elif self._has_reasoning:
                self._held_reasoning[choice] += part.text
                if self._body.stream_reasoning:
                    yield from self._taken_reasoning(choice)
        if is_last:
            yield from self._taken_reasoning(choice)

    def _taken_reasoning(self, choice: int) -> Iterator[Part]:
        text, self._held_reasoning[choice] = self._held_reasoning[choice], ""
        if text:
            yield TextPart("reasoning", text)

    def _deltas_of(self, choice: int, part: Part) -> Iterator[dict]:
        if isinstance(part, ToolCall):
            index = self._num_calls[choice]
            written = self._written(choice, part, whole=False)
            yield {"tool_calls": [{"index": index, **written}]}
            yield {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}
        elif part.kind == "reasoning":
            yield {"reasoning": part.text, "reasoning_content": part.text}
        else:
            yield {"content": part.text}

    def _written(self, choice: int, call: ToolCall, *, whole: bool) -> dict:
        self._num_calls[choice] += 1
        call_id = call.call_id or _NEW_IDS.get(self._format.calls or "", _new_id)()
        if call.call_id is None and self._body.return_meta_info:
            call_id = f"call_{uuid.uuid4().hex[:24]}"
        function = {"name": call.name, "arguments": call.arguments if whole else ""}
        return {"id": call_id, "type": "function", "function": function}


def asked_parts(body: ChatBody) -> dict[str, bool]:
    """Return whether calls and reasoning are separated from the content of an answer."""
    return {"has_calls": bool(body.offered_tools), "has_reasoning": body.separate_reasoning}


def _new_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


_NEW_IDS: Mapping[str, Callable[[], str]] = {"mistral": lambda: uuid.uuid4().hex[:9]}
"""Ids of calls that a family's template requires; other ids are vLLM's, or SGLang's in its dialect."""


def _joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.kind == kind)
