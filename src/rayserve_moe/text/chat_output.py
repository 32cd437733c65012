"""Splitting of a checkpoint's answers into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from rayserve_moe.requests.reasoning_span import ReasoningMarkers, ReasoningSpan
from rayserve_moe.text.chat import template_text
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.call_grammar import CallForm, form_of
from rayserve_moe.text.tool_calls.harmony import REASONING, split_harmony
from rayserve_moe.text.tool_calls.json_calls import dumped, named_call
from rayserve_moe.text.tool_calls.parameter_schemas import resolved
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY, RESPONSE_TEMPLATE, THINKING, output_format
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, Split, Thinking, split_text
from rayserve_moe.text.tool_calls.tape import Kind, Steps, Tape, Tools

_TOOLS = re.compile(r"\btools\b")
_TAIL = 16
"""Number of last prompt tokens that are searched for a reasoning marker."""
_CALLS = "tool_calls"
_REGION_KINDS: Mapping[str, Kind] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
}
_PARSER_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class ChatOutput:
    """Answer formats of a checkpoint, with a splitter per answer that holds reasoning or calls."""

    def __init__(self, tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """Select the formats.

        Raises: ValueError if transformers rejects the `response_template`, or if it is requested and missing.
        """
        self._tokenizer = tokenizer
        own = getattr(tokenizer.backing, "response_template", None)
        self.format = output_format(
            template_text(tokenizer),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            has_response_template=own is not None,
        )
        if RESPONSE_TEMPLATE in self.format and own is None:
            raise ValueError(f"{tokenizer.directory}: the tokenizer has no response_template: name another parser")
        self._special_ids = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}
        self._own = load_response_template(own) if own is not None and RESPONSE_TEMPLATE in self.format else None

    @property
    def takes_tools(self) -> bool:
        """Return True if the chat template accepts tools."""
        return _TOOLS.search(template_text(self._tokenizer)) is not None

    def kept_ids(self, *, has_calls: bool, has_reasoning: bool) -> frozenset[int]:
        """Return the special ids that must stay in the text so that the splitter can find its markers."""
        calls, reasoning = self._formats(has_calls, has_reasoning)
        if self._own is not None and RESPONSE_TEMPLATE in (calls, reasoning):
            return self._tokenizer.special_ids - set(self._tokenizer.eos_token_ids)
        markers = {*(CALL_FORMATS[calls].markers if calls else ()), *(THINKING[reasoning][:2] if reasoning else ())}
        if HARMONY in (calls, reasoning):
            markers |= set(CALL_FORMATS[HARMONY].markers)
        special = self._special_ids.items()
        return frozenset(token_id for token, token_id in special if token and any(token in one for one in markers))

    def splitter(
        self,
        prompt_ids: np.ndarray,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        has_calls: bool,
        has_reasoning: bool,
        max_calls: int | None = None,
    ) -> OutputSplitter | None:
        """Return the splitter of an answer to a prompt, or None if the answer is content only."""
        calls, reasoning = self._formats(has_calls, has_reasoning)
        if calls is None and reasoning is None:
            return None
        split = self._split(calls, reasoning, prompt_ids, tools)
        return OutputSplitter(split, tools=parameters_of(tools), max_calls=max_calls)

    def reasoning_end(self, prompt_ids: np.ndarray) -> str:
        """Return the marker that ends the reasoning begun by a prompt; empty if the prompt begins none."""
        thinking = self._thinking(self.format.reasoning, prompt_ids)
        return thinking.end if thinking is not None and thinking.is_begun else ""

    def reasoning_markers(self, prompt_ids: np.ndarray) -> ReasoningMarkers | None:
        """Return the ids around reasoning in the answer to a prompt, or None if they are unknown."""
        if self._markers is None:
            return None
        thinking = self._thinking(self.format.reasoning, prompt_ids)
        return self._markers._replace(is_begun=thinking is not None and thinking.is_begun)

    def num_reasoning_tokens(self, prompt_ids: np.ndarray, output_ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens in an answer; 0 if the markers are unknown."""
        if (markers := self.reasoning_markers(prompt_ids)) is None:
            return 0
        span = ReasoningSpan(markers, self._tokenizer.token_bytes)
        span.follow(output_ids)
        return span.num_tokens

    @cached_property
    def _markers(self) -> ReasoningMarkers | None:
        name = self.format.reasoning
        if name is None or name == RESPONSE_TEMPLATE:
            return None
        texts = REASONING if name == HARMONY else THINKING[name][:2]
        begin, end = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return ReasoningMarkers(begin, end)

    def call_form(self) -> CallForm | None:
        """Return the written form of calls, or None if it is unknown."""
        ends = {self._tokenizer.token_text(token_id) for token_id in self._tokenizer.eos_token_ids}
        return form_of(self.format.calls, template_text(self._tokenizer), ends=ends)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Return the ids of special tokens by their text."""
        return self._special_ids

    def _thinking(self, reasoning: str | None, prompt_ids: np.ndarray) -> Thinking | None:
        """Return the markers of reasoning, with `is_begun` set from the prompt."""
        if reasoning is None:
            return None
        thinking = THINKING[reasoning]
        tail = self._tokenizer.decode(prompt_ids[-_TAIL:].tolist(), skip_special_tokens=False).rstrip()
        is_begun = tail.endswith(thinking.begin) or (thinking.is_begun and not tail.endswith(thinking.end))
        return thinking._replace(is_begun=is_begun)

    def _formats(self, has_calls: bool, has_reasoning: bool) -> tuple[str | None, str | None]:
        return self.format.calls if has_calls else None, self.format.reasoning if has_reasoning else None

    def _split(
        self, calls: str | None, reasoning: str | None, prompt_ids: np.ndarray, tools: Sequence[Mapping[str, Any]]
    ) -> Split:
        if HARMONY in (calls, reasoning):
            return split_harmony(has_calls=calls is not None, has_reasoning=reasoning is not None)
        if self._own is not None:
            prompt = self._tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
            return split_by_template(
                self._own,
                prompt=prompt,
                tools=[dict(tool) for tool in tools],
                has_calls=calls is not None,
                has_reasoning=reasoning is not None,
            )
        thinking = self._thinking(reasoning, prompt_ids)
        return split_text(thinking, None if calls is None else CALL_FORMATS[calls])


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the parameter schemas by function name and parameter name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", {})
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        found[function.get("name", "")] = {key: resolved(one, parameters) for key, one in properties.items()}
    return found


def split_by_template(
    template: ResponseTemplate, *, prompt: str, tools: Sequence[dict], has_calls: bool, has_reasoning: bool
) -> Split:
    """Return a parser that reads the answer to a prompt by the tokenizer's own `response_template`.

    The parser takes text by character, so the result does not depend on how the text arrives. A region that cannot be
    read becomes content, without its markers.
    """

    def split(tape: Tape) -> Steps[None]:
        regions = _Regions(tape, template, has_calls=has_calls, has_reasoning=has_reasoning)
        parser = ResponseParser(template, prefix=prompt, tools=list(tools))
        regions.take(parser.initial_events, in_prompt=True)
        while True:
            for character in tape.text[tape.position :]:
                try:
                    regions.take(parser.feed(character))
                except _PARSER_FAULTS:
                    regions.give_up()
                    parser = ResponseParser(template, prefix="", tools=list(tools))
            tape.position = len(tape.text)
            if tape.is_ended:
                break
            tape.trim()
            yield
        try:
            regions.take(parser.finalize()[1])
        except _PARSER_FAULTS:
            regions.give_up()

    return split


class _Regions:
    """Conversion of parser events to parts; whitespace around the text of a region is dropped."""

    def __init__(self, tape: Tape, template: ResponseTemplate, *, has_calls: bool, has_reasoning: bool) -> None:
        self._tape, self._template = tape, template
        self._has_calls, self._has_reasoning = has_calls, has_reasoning
        self._enter("")

    def _enter(self, field: str) -> None:
        self._opened, self._body, self._held, self._has_text = field, "", "", False

    def take(self, events: Sequence[Mapping[str, Any]], *, in_prompt: bool = False) -> None:
        """Process events of the prompt's text or of the answer."""
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
        """Close a region without a value: its text becomes content unless it was already emitted."""
        if self._kind is None:
            self._tape.emit("content", self._body)
        self._enter("")

    @property
    def _kind(self) -> Kind | None:
        if self._opened == _CALLS:
            return None if self._has_calls else "content"
        kind = _REGION_KINDS.get(self._opened)
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
