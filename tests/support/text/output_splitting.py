"""Splitting outputs in pieces of any size, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayserve_moe.text.tool_calls.harmony import split_harmony
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, Thinking, split_text
from rayserve_moe.text.tool_calls.tape import Part, TextPart, ToolCall, Tools

THINK = Thinking()


class Answer(NamedTuple):
    """An output's parts, joined by kind."""

    reasoning: str
    content: str
    calls: list[ToolCall]


def splitter_of(
    calls: str | None, *, thinking: Thinking | None = THINK, tools: Tools | None = None, max_calls: int | None = None
) -> OutputSplitter:
    """Return a splitter for calls of this format."""
    if calls == HARMONY:
        split = split_harmony(has_calls=True, has_reasoning=thinking is not None)
    else:
        split = split_text(thinking, None if calls is None else CALL_FORMATS[calls])
    return OutputSplitter(split, tools=tools, max_calls=max_calls)


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def parts_of(splitter: OutputSplitter, pieces: Sequence[str]) -> list[Part]:
    """Return all parts, in order; neighbouring texts of one kind are one."""
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in splitter.push(piece)), *splitter.finish()]:
        last = found[-1] if found else None
        if isinstance(part, TextPart) and isinstance(last, TextPart) and last.kind == part.kind:
            found[-1] = TextPart(part.kind, last.text + part.text)
        else:
            found.append(part)
    return found


def answer_of(parts: Sequence[Part]) -> Answer:
    texts = [part for part in parts if isinstance(part, TextPart)]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    reasoning, content = ("".join(text for each, text in texts if each == kind) for kind in ("reasoning", "content"))
    return Answer(reasoning, content, calls)


def split(calls: str | None, text: str, **options: object) -> Answer:
    """Split a text given at once, one given character by character and others; they have to agree."""
    sizes = (max(1, len(text)), 1, 2, 3, 5, 7, 16)
    each = [parts_of(splitter_of(calls, **options), pieces_of(text, size)) for size in sizes]
    assert all(parts == each[0] for parts in each)
    return answer_of(each[0])
