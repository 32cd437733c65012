"""Parser of gpt-oss messages: analysis is reasoning, commentary to a function is a call, everything else is content.

The prompt ends within the header of the first message. A message that breaks these rules becomes content unchanged.
"""

from __future__ import annotations

import re

from rayserve_moe.text.tool_calls.json_calls import named_call
from rayserve_moe.text.tool_calls.splitter import Split, pass_on
from rayserve_moe.text.tool_calls.tape import BrokenCall, Kind, Steps, Tape, close, json_text, skip, take, until

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

REASONING = f"{CHANNEL}analysis{MESSAGE}", END
"""Texts that begin and end a reasoning message."""

_ENDS = (END, CALL, RETURN)
_HEADER = re.compile(
    r"\s*(?:assistant)?\s*(?:to=(?P<role_to>\S+?))?\s*<\|channel\|>\s*(?P<channel>analysis|commentary|final)"
    r"\s*(?:to=(?P<to>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*(?:\w+)?\s*"
)
_FUNCTIONS = "functions."


def split_harmony(*, has_calls: bool, has_reasoning: bool) -> Split:
    """Return the parser of an answer. A disabled kind (calls, reasoning) becomes content."""
    analysis = "reasoning" if has_reasoning else "content"

    def split(tape: Tape) -> Steps[None]:
        seen: set[Kind] = set()
        while True:
            begin = tape.position
            yield from skip(tape)
            if tape.position == len(tape.text):
                if not seen:
                    tape.emit("content", tape.text[begin:])
                return
            if seen:
                begin = tape.position
            try:
                channel, recipient = yield from _read_header(tape)
                if recipient is not None:
                    yield from _read_call(tape, recipient if has_calls else "")
            except BrokenCall:
                tape.position = begin
                yield from _pass_on_broken(tape, seen)
            else:
                if recipient is None:
                    yield from _pass_on_body(tape, analysis if channel == "analysis" else "content", seen)

    return split


def _read_header(tape: Tape) -> Steps[tuple[str, str | None]]:
    """Consume a message header through its body marker; return the channel, and the recipient or None."""
    begin = tape.position
    if (yield from take(tape, START, CHANNEL, "assistant", "to=")) is None:
        raise BrokenCall
    tape.position = begin
    yield from take(tape, START)
    text, marker = yield from until(tape, MESSAGE, START, *_ENDS)
    found = _HEADER.fullmatch(text)
    if found is None or marker != MESSAGE:
        raise BrokenCall
    return found["channel"], found["role_to"] or found["to"]


def _read_call(tape: Tape, recipient: str) -> Steps[None]:
    if not recipient.startswith(_FUNCTIONS):
        raise BrokenCall
    text = yield from json_text(tape)
    call = named_call(recipient.removeprefix(_FUNCTIONS), text)
    if (yield from close(tape, *_ENDS, START)) == START:
        tape.position -= len(START)
    tape.call(call)


def _pass_on_body(tape: Tape, kind: Kind, seen: set[Kind]) -> Steps[None]:
    """Emit the text of a message and consume its end; a newline separates messages of the same kind."""
    if kind in seen:
        tape.emit(kind, "\n")
    seen.add(kind)
    marker = yield from pass_on(tape, kind, markers=(*_ENDS, START, CHANNEL), held="")
    if marker in _ENDS:
        tape.position += len(marker)


def _pass_on_broken(tape: Tape, seen: set[Kind]) -> Steps[None]:
    """Emit everything up to the next message as content."""
    begin = tape.position
    yield from take(tape, START)
    tape.emit("content", tape.text[begin : tape.position])
    seen.add("content")
    yield from pass_on(tape, "content", markers=(START,), held="")
