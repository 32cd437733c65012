"""From the bytes of a request body to a checked schema object. Every fault of the input is a 400."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.admission import INLINE_BYTES, Intake
from rayserve_moe.serving.middleware.ignored_fields import IgnoredFields
from rayserve_moe.serving.middleware.json_pieces import JsonFault, parse_in_pieces
from rayserve_moe.serving.schemas.field_checks import taken_fields
from rayserve_moe.serving.schemas.known_fields import FIELDS

Schema = TypeVar("Schema", bound=BaseModel)

_SUBJECT = re.compile("^(Value error,|Input|Field|String|List) ")
"""What a fault's sentence begins with; the name of the field stands in for it."""


async def read_body(request: Request, schema: type[Schema], *, intake: Intake, ignored: IgnoredFields) -> Schema:
    """Read, parse and check the body, on a thread where it is long; whatever its type says, it is taken as JSON."""
    with ExitStack() as held:
        body = await _bytes_of(request, intake, held)
        check = partial(_checked, body, schema)
        if len(body) > INLINE_BYTES:
            checked, unknown = await intake.run(lambda _: check(), size=len(body), receive=request.receive)
        else:
            checked, unknown = check()
    ignored.note(request, unknown)
    return checked


async def _bytes_of(request: Request, intake: Intake, held: ExitStack) -> bytes:
    """The whole body, which counts as held as it arrives. One that is refused is read on: its client still writes."""
    parts: list[bytes] = []
    refusal: ApiError | None = None
    async for part in request.stream():
        try:
            if refusal is None:
                held.enter_context(intake.holding(len(part)))
                parts.append(part)
        except ApiError as error:
            refusal = error
            parts.clear()
            held.close()
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _checked(body: bytes, schema: type[Schema]) -> tuple[Schema, Sequence[str]]:
    taken, unknown = taken_fields(parse_object(body), FIELDS[schema])
    return validate(schema, taken), unknown


def parse_object(body: bytes) -> dict:
    """Parse one strict JSON object, as `parse_in_pieces` has it."""
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
        raise ApiError(400, f"`{param}` {sentence}" if param else sentence, param=param) from error
