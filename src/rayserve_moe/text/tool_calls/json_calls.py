"""Tool calls written as JSON: name and arguments are taken from an object, and the arguments keep their text.

Formats that consist of such an object are here: Hermes (also Qwen3 and Ling 2), and Llama 3.
"""

from __future__ import annotations

import json
import re

from rayserve_moe.text.tool_calls.tape import (
    BrokenCall,
    CallFormat,
    Steps,
    Tape,
    ToolCall,
    close,
    expect,
    json_text,
    skip,
    take,
)

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Numbers stay text: only their position matters, and they may exceed Python's integer conversion limit.
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_int=str, parse_float=str)
_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_int=str, parse_float=str)


def _read_hermes(tape: Tape) -> Steps[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    yield from expect(tape, _BEGIN)
    text = yield from json_text(tape)
    yield from close(tape, _END)
    tape.call(call_of(text))


HERMES = CallFormat({_BEGIN: _read_hermes}, (_BEGIN, _END))


def _read_llama(tape: Tape) -> Steps[None]:
    """Read `{"name": ..., "parameters": {...}}` after a special token."""
    yield from expect(tape, _PYTHON)
    yield from _read_bare(tape)


def _read_bare(tape: Tape) -> Steps[None]:
    """Read the whole answer. A semicolon separates calls; an object without parameters is an answer in JSON."""
    if tape.num_calls:
        yield from skip(tape)
        yield from take(tape, ";")
    text = yield from json_text(tape)
    if not members(text).keys() & {"arguments", "parameters"}:
        raise BrokenCall
    tape.call(call_of(text))


LLAMA = CallFormat({_PYTHON: _read_llama}, (_PYTHON,), bare=_read_bare)


def call_of(text: str) -> ToolCall:
    """Return the call in `{"name": ..., "arguments": {...}}`.

    `parameters` may replace `arguments`, which default to `{}`.

    Raises: BrokenCall if the text is not JSON or has no name.
    """
    found = members(text)
    name = _decoded(found.get("name", "null"))
    given = next((found[key] for key in _ARGUMENTS if key in found), "null")
    call_id = _decoded(found.get("id", "null"))
    return named_call(name, given, call_id=call_id if isinstance(call_id, str) else None)


def named_call(name: object, arguments: str, *, call_id: str | None = None) -> ToolCall:
    """Return a call whose arguments are a JSON object, or a JSON string that holds an object.

    Raises: BrokenCall for other arguments or an invalid name.
    """
    if not isinstance(name, str) or not name.strip() or not _is_text(name) or (call_id and not _is_text(call_id)):
        raise BrokenCall
    return ToolCall(name.strip(), arguments_of(arguments.strip()), call_id)


def arguments_of(text: str) -> str:
    """Return the text of a JSON object unchanged, except that control characters in strings are escaped.

    Raises: BrokenCall if the text is not an object.
    """
    if text.startswith('"'):
        text = str(_decoded(text)).strip()
    if text in ("null", ""):
        return "{}"
    if not isinstance(_decoded(text), dict):
        raise BrokenCall
    if is_json(text):
        return text
    return _STRING.sub(lambda string: _CONTROL.sub(lambda one: f"\\u{ord(one[0]):04x}", string[0]), text)


def is_json(text: str) -> bool:
    """Return True if a text is strict JSON."""
    try:
        _STRICT.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def dumped(value: object) -> str:
    """Return a value as JSON text; non-ASCII text stays readable unless it holds lone surrogates.

    Raises: ValueError for NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_text(text) else json.dumps(value)


def members(text: str) -> dict[str, str]:
    """Return the JSON text of each member of an object; the last duplicate key wins.

    Raises: BrokenCall if the text is not an object.
    """
    if not isinstance(_decoded(text), dict):
        raise BrokenCall
    found: dict[str, str] = {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _LENIENT.raw_decode(text, at)
        begin = _after_space(text, _after_space(text, at) + 1)
        _, at = _LENIENT.raw_decode(text, begin)
        found[key] = text[begin:at]
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def items(text: str) -> list[str]:
    """Return the JSON texts of an array's items.

    Raises: BrokenCall if the text is not an array.
    """
    if not isinstance(_decoded(text), list):
        raise BrokenCall
    found: list[str] = []
    at = _after_space(text, text.index("[") + 1)
    while text[at] != "]":
        _, end = _LENIENT.raw_decode(text, at)
        found.append(text[at:end])
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _decoded(text: str) -> object:
    try:
        return _LENIENT.decode(text)
    except (ValueError, RecursionError) as error:
        raise BrokenCall from error


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _is_text(text: str) -> bool:
    """Return True if a text has no lone surrogates, which an answer cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
