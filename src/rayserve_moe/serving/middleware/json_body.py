"""Conversion of request bodies to validated schema objects. Every fault of the input is a 400."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rayserve_moe.requests.retention import Retention
from rayserve_moe.serving.api.schemas.known_fields import FIELDS, NOTHING, KnownFields
from rayserve_moe.serving.api.schemas.openai import ChatBody
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.journalling import note_body
from rayserve_moe.serving.middleware.admission import INLINE_BYTES, Admission
from rayserve_moe.serving.middleware.ignored_fields import note_ignored
from rayserve_moe.serving.retention_hints import record_retention, retention_in_body
from rayserve_moe.serving.session_identity import named_in_body, record_name

Schema = TypeVar("Schema", bound=BaseModel)

_SUBJECT = re.compile("^(Value error,|Input|Field|String|List) ")
"""Beginning of pydantic's sentence, which the field's name replaces."""
_NAMED = re.compile(r"`(\w+)`")
"""Field at the beginning of a sentence about several fields."""
_MAX_COMPARED_NAME_LENGTH = 64
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
MAX_STRINGS = 2**17
"""Maximum number of strings in a text, including field names."""
MAX_CONTAINERS = 2**20
"""Maximum number of lists and objects in a text: forced routing in JSON has a list per token and layer."""
MAX_DEPTH = 64
PIECE_BYTES = 32768
"""Size of a piece, which parses in a millisecond or two. A single string is never cut."""
_MARK = re.compile(rb'[\[\]{}"NI]')
_STRING_PART = re.compile(rb'(?:[^"\\]++|\\.){0,4096}+', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTE = ord('"')
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}
_PLACEHOLDER = b"NaN"


async def read_body(request: Request, schema: type[Schema], *, admission: Admission) -> Schema:
    """Read, parse and validate the body, on a thread if it is long. The content type is ignored."""
    return await _read(request, schema, admission, partial(_parsed, admits_nothing=False))


async def read_options(request: Request, schema: type[Schema], *, admission: Admission) -> Schema:
    """Read options from an optional body and the query; the query takes precedence."""
    query = {name: _FLAGS.get(value.lower(), value) for name, value in request.query_params.items()}
    return await _read(request, schema, admission, lambda body: _parsed(body, admits_nothing=True) | query)


async def _read(
    request: Request, schema: type[Schema], admission: Admission, parse: Callable[[bytes], dict[str, Any]]
) -> Schema:
    with ExitStack() as held:
        body = await _bytes_of(request, admission, held)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(
                400, "the request body is compressed: send it without a content-encoding", code="invalid_json"
            )
        check = partial(_checked, body, schema, parse)
        if len(body) > INLINE_BYTES:
            read = await admission.run(lambda _: check(), size=len(body), receive=request.receive)
        else:
            read = check()
    checked, unknown, session, retention = read
    record_name(request.scope, session)
    record_retention(request.scope, retention)
    note_ignored(request, unknown)
    note_body(request.scope, body, checked=checked)
    return checked


async def _bytes_of(request: Request, admission: Admission, held: ExitStack) -> bytes:
    """Read the whole body and count its bytes.

    A rejected body is also read to its end, because its client still writes.
    """
    parts: list[bytes] = []
    refusal: ApiError | None = None
    async for part in request.stream():
        try:
            if refusal is None:
                held.enter_context(admission.holding(len(part)))
                parts.append(part)
        except ApiError as error:
            refusal = error
            parts.clear()
            held.close()
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _checked(
    body: bytes, schema: type[Schema], parse: Callable[[bytes], dict[str, Any]]
) -> tuple[Schema, Sequence[str], str, Retention]:
    """Return the validated body, the names of unknown fields, the name of a session, and hints about its pages."""
    known, fields = FIELDS[schema], parse(body)
    taken, unknown = taken_fields(fields, known)
    if unknown and (meant := known.meant_by(unknown)):
        message = f"the body has an unknown field: the nearest known one is `{meant}`"
        raise ApiError(400, message, param=meant, code="unknown_field")
    return validate(schema, taken), unknown, named_in_body(fields), retention_in_body(fields)


def _parsed(body: bytes, *, admits_nothing: bool) -> dict[str, Any]:
    if admits_nothing and not body.strip():
        return {}
    try:
        parsed = parse_in_pieces(body)
    except JsonFault as error:
        raise ApiError(400, f"cannot read the request body as JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "cannot read the request body as JSON: it must be an object", code="invalid_json")
    return parsed


def validate(schema: type[Schema], fields: dict) -> Schema:
    """Validate a parsed object; the first fault becomes the error's sentence and `param`."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(step) for step in fault["loc"]) or None
        sentence = _SUBJECT.sub("", fault["msg"]).replace(" after validation", "")
        sentence = {"required": "is required"}.get(sentence, sentence)
        if param is None and (named := _NAMED.match(sentence)):
            raise ApiError(400, sentence, param=named[1]) from error
        raise ApiError(400, f"`{param}` {sentence}" if param else sentence, param=param) from error


@contextmanager
def refusals_translated(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Rename chat fields in errors to the fields of the dialect from which the chat was translated."""
    try:
        yield
    except ApiError as error:
        if (theirs := names.get(error.param or "")) is None:
            raise
        message = error.message.replace(f"`{error.param}`", f"`{theirs}`")
        raise ApiError(error.status, message, param=theirs, code=error.code) from error


def chat_from(fields: dict[str, Any]) -> ChatBody:
    """Validate the fields of a chat that was translated from another dialect."""
    taken, _ = taken_fields(fields, FIELDS[ChatBody])
    return validate(ChatBody, taken)


def taken_fields(fields: dict[str, Any], known: KnownFields) -> tuple[dict[str, Any], list[str]]:
    """Return the fields under the schema's names, and the unknown names. Null counts as missing.

    Raises: ApiError 400 for a refused field that is not switched off, and for an unknown name in a nested object.
    """
    return _taken(fields, known, path="")


def _taken(fields: dict[str, Any], known: KnownFields, *, path: str) -> tuple[dict[str, Any], list[str]]:
    taken: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in fields.items():
        own = known.other_names.get(name, name)
        if value is None or name in known.accepted:
            continue
        if own in known.computed:
            if own in taken:
                other = next(other for other, field in known.other_names.items() if field == own)
                raise ApiError(400, f"`{path}{own}` and `{path}{other}` are one field: give one", param=path + own)
            taken[own] = _within(value, known.nested[own], path + own) if own in known.nested else value
        elif name not in known.refused:
            unknown.append(name)
        elif value not in (*NOTHING, *known.refused[name]):
            raise ApiError(400, f"`{path}{name}` is not supported: leave it out", param=path + name)
    return taken, unknown


def _within(value: Any, known: KnownFields, path: str) -> Any:
    """Validate the names of a nested object, or of each object in a list; the schema rejects other values."""
    if isinstance(value, list):
        return [_within(each, known, f"{path}.{place}") for place, each in enumerate(value)]
    if not isinstance(value, dict) or (known.kinds and value.get("type") not in known.kinds):
        return value
    taken, unknown = _taken(value, known, path=f"{path}.")
    if unknown:
        (nearest,) = difflib.get_close_matches(unknown[0][:_MAX_COMPARED_NAME_LENGTH], known.names, cutoff=0.0, n=1)
        raise ApiError(400, f"`{path}` has an unknown field: the nearest known one is `{nearest}`", param=path)
    return taken


class JsonFault(ValueError):
    """Error for text that is not strict JSON or exceeds a bound. Its message never quotes the text."""


def parse_in_pieces(text: bytes) -> object:
    """Parse a JSON value: UTF-8, finite numbers, unique names in objects, no lone surrogates.

    A scan finds strings and brackets. A container longer than a piece is cut at its own commas, and each piece is
    parsed separately so that other threads can run in between. In the surrounding text NaN, which strict JSON lacks, is
    the placeholder of the parsed value. The rest of the outermost container is parsed last.

        {"prompt": [1, ... | 8, ... | 16, ...], "n": 2}   ->   three lists that are joined, then {"prompt": NaN, "n": 2}

    A text of a single piece that cannot be nested too deeply is parsed without a scan, which then only names its fault.

    Raises: JsonFault for anything else.
    """
    if len(text) <= PIECE_BYTES and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        with suppress(JsonFault):
            return _parse_piece(text, iter(()))
    containers = [_Container(text, start=-1, closing=0)]
    at = num_strings = num_containers = 0
    while mark := _MARK.search(text, at):
        start, kind, inner = mark.start(), text[mark.start()], containers[-1]
        if start - inner.piece_start > PIECE_BYTES and len(containers) > 1:
            inner.cut(at, start)
        at = start + 1
        if kind == _QUOTE:
            num_strings += 1
            at = _end_of_string(text, at, num_strings)
        elif kind in _CLOSING:
            num_containers += 1
            _check_nesting(num_containers, depth=len(containers))
            containers.append(_Container(text, start=start, closing=_CLOSING[kind]))
        elif kind == inner.closing:
            containers.pop().close(start, outer=containers[-1])
        else:
            raise JsonFault("NaN and Infinity are not JSON numbers" if kind in b"NI" else "brackets do not match")
    if len(containers) > 1:
        raise JsonFault("it ends inside of a list or an object")
    return containers[0].parsed(len(text))


def _end_of_string(text: bytes, at: int, num_strings: int) -> int:
    if num_strings > MAX_STRINGS:
        raise JsonFault(f"it holds more than {MAX_STRINGS} strings, names of fields among them")
    while (part := _STRING_PART.match(text, at)) and part.end() > at:
        at = part.end()
    if text[at : at + 1] != b'"':
        raise JsonFault("a string in it does not end")
    return at + 1


def _check_nesting(num_containers: int, *, depth: int) -> None:
    if num_containers > MAX_CONTAINERS:
        raise JsonFault(f"it holds more than {MAX_CONTAINERS} lists and objects")
    if depth > MAX_DEPTH:
        raise JsonFault("it is nested too deeply")


class _Container:
    """Open container, or the whole text: `[parsed into taken | before, with placeholders | from piece_start on]`."""

    __slots__ = ("before", "closing", "piece_start", "start", "taken", "text", "values")

    def __init__(self, text: bytes, *, start: int, closing: int) -> None:
        self.text, self.start, self.closing = text, start, closing
        self.piece_start = start + 1
        self.before: tuple[bytes, ...] = ()
        self.values: tuple[object, ...] = ()
        self.taken: Any = None

    def cut(self, start: int, stop: int) -> None:
        """Parse complete pieces; all commas in `[start, stop)`, between two marks, belong to this container."""
        while stop - self.piece_start > PIECE_BYTES:
            comma = self.text.find(b",", max(start, self.piece_start + PIECE_BYTES), stop)
            if comma < 0:
                return
            self._take(comma)
            self.piece_start = comma + 1

    def close(self, end: int, *, outer: _Container) -> None:
        """End at `end`; if the container was cut, put a placeholder into the outer container."""
        if self.taken is None and not self.before:
            return
        self._take(end)
        outer.before += (self.text[outer.piece_start : self.start], _PLACEHOLDER)
        outer.values += (self.taken,)
        outer.piece_start = end + 1

    def parsed(self, end: int) -> Any:
        """Parse the unparsed rest, up to `end`."""
        opening, closing = b"", b""
        if self.closing:
            opening, closing = self.text[self.start : self.start + 1], bytes([self.closing])
        raw = b"".join((opening, *self.before, self.text[self.piece_start : end], closing))
        return _parse_piece(raw, iter(self.values))

    def _take(self, end: int) -> None:
        """Parse up to `end` and append the result to the previous pieces."""
        piece = self.parsed(end)
        if not piece:
            raise JsonFault("a value is missing between two commas")
        if self.taken is None:
            self.taken = piece
        elif isinstance(piece, list):
            self.taken.extend(piece)
        elif self.taken.keys().isdisjoint(piece):
            self.taken.update(piece)
        else:
            raise JsonFault("an object in it has the same key twice")
        self.before = self.values = ()


def _parse_piece(raw: bytes, values: Iterator[object]) -> object:
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text, parse_constant=lambda _: _next_of(values), object_pairs_hook=_object_of_pairs)
        if _SURROGATE_ESCAPE.search(text) and (lone := _lone_surrogate(json.loads(text))):
            raise JsonFault(f"{lone} in a string or a key is half of a surrogate pair, without its other half")
    except UnicodeError as error:
        raise JsonFault("it is not valid Unicode text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise JsonFault(error.msg) from error
    except JsonFault:
        raise
    except ValueError as error:
        raise JsonFault("a number in it has too many digits") from error
    return parsed


def _next_of(values: Iterator[object]) -> object:
    """Return the value of a placeholder."""
    for value in values:
        return value
    raise JsonFault("NaN and Infinity are not JSON numbers")


def _lone_surrogate(parsed: object) -> str:
    """Return the escape of the first lone surrogate in any string or key; empty if none."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise JsonFault("an object in it has the same key twice")
    return parsed
