"""From the bytes of a request body to a checked schema object. Every fault of the input is a 400."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.journalling import note_body
from rayserve_moe.serving.middleware.admission import INLINE_BYTES, Admission
from rayserve_moe.serving.middleware.ignored_fields import note_ignored
from rayserve_moe.serving.middleware.json_pieces import JsonFault, parse_in_pieces
from rayserve_moe.serving.schemas.known_fields import FIELDS, NOTHING, KnownFields
from rayserve_moe.serving.schemas.openai import ChatBody

Schema = TypeVar("Schema", bound=BaseModel)

_SUBJECT = re.compile("^(Value error,|Input|Field|String|List) ")
"""The beginning of a fault's sentence, which the name of the field replaces."""
_NAMED = re.compile(r"`(\w+)`")
"""The field that a sentence about several begins with."""
_LONGEST_COMPARED_NAME = 64
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


async def read_body(request: Request, schema: type[Schema], *, admission: Admission) -> Schema:
    """Read, parse and check the body, on a thread where it is long. Its content type is not looked at."""
    return await _read(request, schema, admission, partial(_parsed, admits_nothing=False))


async def read_options(request: Request, schema: type[Schema], *, admission: Admission) -> Schema:
    """Read options from a body, which may be missing, and from the query, which counts where both have one."""
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
            checked, unknown = await admission.run(lambda _: check(), size=len(body), receive=request.receive)
        else:
            checked, unknown = check()
    note_ignored(request, unknown)
    note_body(body, checked)
    return checked


async def _bytes_of(request: Request, admission: Admission, held: ExitStack) -> bytes:
    """Read the whole body, counting its bytes. A refused one is read to its end too: its client still writes."""
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
) -> tuple[Schema, Sequence[str]]:
    taken, unknown = taken_fields(parse(body), FIELDS[schema])
    return validate(schema, taken), unknown


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
    """Check a parsed object; the first fault becomes the error's sentence and `param`."""
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
    """Have errors about fields of a chat name those of the dialect that it was translated from."""
    try:
        yield
    except ApiError as error:
        if (theirs := names.get(error.param or "")) is None:
            raise
        message = error.message.replace(f"`{error.param}`", f"`{theirs}`")
        raise ApiError(error.status, message, param=theirs, code=error.code) from error


def chat_from(fields: dict[str, Any]) -> ChatBody:
    """Read the fields of a chat that another dialect has been translated to."""
    taken, _ = taken_fields(fields, FIELDS[ChatBody])
    return validate(ChatBody, taken)


def taken_fields(fields: dict[str, Any], known: KnownFields) -> tuple[dict[str, Any], list[str]]:
    """Return the fields for the schema, under its own names, and the names that are not known.

    ApiError 400 for a refused field that is not switched off, and for an unknown name in a nested object. Null is the
    same as not given.
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
    """Check a nested object, or each in a list; the schema refuses other values."""
    if isinstance(value, list):
        return [_within(each, known, f"{path}.{place}") for place, each in enumerate(value)]
    if not isinstance(value, dict) or (known.kinds and value.get("type") not in known.kinds):
        return value
    taken, unknown = _taken(value, known, path=f"{path}.")
    if unknown:
        (nearest,) = difflib.get_close_matches(unknown[0][:_LONGEST_COMPARED_NAME], known.names, cutoff=0.0, n=1)
        raise ApiError(400, f"`{path}` has an unknown field: the nearest known one is `{nearest}`", param=path)
    return taken
