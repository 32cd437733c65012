"""From the bytes of a request body to a checked schema object. Every fault of the input is a 400."""

from __future__ import annotations

import json
import re
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.field_checks import taken_fields
from rayserve_moe.serving.ignored_fields import IgnoredFields
from rayserve_moe.serving.known_fields import FIELDS

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(request: Request, schema: type[Schema], *, ignored: IgnoredFields) -> Schema:
    """Read, parse and check the body; whatever its content type says, it is taken as JSON."""
    taken, unknown = taken_fields(parse_object(await request.body()), FIELDS[schema])
    ignored.note(request, unknown)
    return validate(schema, taken)


def parse_object(body: bytes) -> dict:
    """Parse one strict JSON object: UTF-8, finite numbers, no duplicate keys, no lone surrogates."""
    try:
        text = body.decode("utf-8")
        parsed = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_of_pairs)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise _bad_json("it is not valid Unicode text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except RecursionError as error:
        raise _bad_json("it is nested too deeply") from error
    except ValueError as error:
        raise _bad_json("a number in it has too many digits") from error
    if not isinstance(parsed, dict):
        raise _bad_json("it must be an object")
    return parsed


def validate(schema: type[Schema], fields: dict) -> Schema:
    """Check a parsed object; the first fault becomes the error's sentence and `param`."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(step) for step in fault["loc"]) or None
        sentence = fault["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("Field ")
        sentence = {"required": "is required"}.get(sentence, sentence)
        raise ApiError(400, f"`{param}` {sentence}" if param else sentence, param=param) from error


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise _bad_json("an object in it has the same key twice")
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise _bad_json("NaN and Infinity are not JSON numbers")


def _bad_json(reason: str) -> ApiError:
    return ApiError(400, f"cannot read the request body as JSON: {reason}", code="invalid_json")
