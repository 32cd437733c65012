"""Answers read by the tokenizer's own `response_template`, with the parser of transformers.

Text goes into it character by character, so that nothing depends on the pieces that it came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from rayserve_moe.text.tool_calls.json_calls import dumped, named_call
from rayserve_moe.text.tool_calls.splitter import Split
from rayserve_moe.text.tool_calls.tape import Kind, Steps, Tape

_CALLS = "tool_calls"
_KINDS: Mapping[str, Kind] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
}
_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def split_by_template(
    template: ResponseTemplate, *, prompt: str, tools: Sequence[dict], has_calls: bool, has_reasoning: bool
) -> Split:
    """Return the parser of the answer to a prompt. Regions that cannot be read are content, without their markers."""

    def split(tape: Tape) -> Steps[None]:
        regions = _Regions(tape, template, has_calls=has_calls, has_reasoning=has_reasoning)
        parser = ResponseParser(template, prefix=prompt, tools=list(tools))
        regions.take(parser.initial_events, in_prompt=True)
        while True:
            for character in tape.text[tape.position :]:
                try:
                    regions.take(parser.feed(character))
                except _FAULTS:
                    regions.give_up()
                    parser = ResponseParser(template, prefix="", tools=list(tools))
            tape.position = len(tape.text)
            if tape.is_ended:
                break
            tape.trim()
            yield
        try:
            regions.take(parser.finalize()[1])
        except _FAULTS:
            regions.give_up()

    return split


class _Regions:
    """Turns the events of a parser into parts: whitespace around the text of a region is left out."""

    def __init__(self, tape: Tape, template: ResponseTemplate, *, has_calls: bool, has_reasoning: bool) -> None:
        self._tape, self._template = tape, template
        self._has_calls, self._has_reasoning = has_calls, has_reasoning
        self._enter("")

    def _enter(self, field: str) -> None:
        self._opened, self._body, self._held, self._has_text = field, "", "", False

    def take(self, events: Sequence[Mapping[str, Any]], *, in_prompt: bool = False) -> None:
        """Take events, of the prompt's own text or of the answer's."""
        for event in events:
            if event["type"] == "region_open":
                self._enter(event["field"])
            elif in_prompt:
                self._enter(self._opened if event["type"] == "region_chunk" else "")
            elif event["type"] == "region_chunk":
                self._take_text(event["text"])
            else:
                self._end(event["value"])

    def give_up(self) -> None:
        """The region has no value: its text is content, unless it was passed on as it came."""
        if self._kind is None:
            self._tape.emit("content", self._body)
        self._enter("")

    @property
    def _kind(self) -> Kind | None:
        if self._opened == _CALLS:
            return None if self._has_calls else "content"
        kind = _KINDS.get(self._opened)
        return kind if self._has_reasoning or kind is None else "content"

    def _take_text(self, text: str) -> None:
        self._body += text
        if (kind := self._kind) is not None:
            text = (self._held + text) if self._has_text else text.lstrip()
            passed = text.rstrip()
            self._held, self._has_text = text[len(passed) :], self._has_text or bool(passed)
            self._tape.emit(kind, passed)

    def _end(self, value: Any) -> None:
        if self._opened == _CALLS and self._has_calls:
            for each in value if isinstance(value, list) else [value]:
                function = each.get("function", each)
                given = function.get("arguments")
                arguments = given if isinstance(given, str) else dumped(given or {})
                self._tape.call(named_call(function.get("name"), arguments))
        self._enter("")
