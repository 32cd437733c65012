"""OpenAPI description: bodies from the models that validate them, and the statuses of each route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE
from rayserve_moe.serving.api.schemas.known_fields import FIELDS, NOTHING, KnownFields

_REF = "#/components/schemas/{model}"
_JSON, _EVENTS = "application/json", "text/event-stream"

MEANINGS = {
    400: "The request is wrong: the error names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is unknown, or no such request is kept.",
    408: "The body did not arrive in time.",
    409: "The update conflicts with the server's state, or another connection has taken over the request.",
    410: "No replica knows the request any more: order it again.",
    413: "The body is longer than the server takes.",
    422: "The model produced logits that are not numbers.",
    429: "Too many requests are waiting: try again later.",
    501: "The feature is unsupported; the error names the alternative.",
    503: "The engine is not running, or the server is shutting down.",
}
ALWAYS = (401,)
GENERATION = (400, 404, 409, 413, 422, 429, 503)
COMMAND = (400, 413, 429, 503)

_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def answers(*refusals: int, kinds: Iterable[str] = (_JSON,)) -> dict[str, Any]:
    """Return decorator arguments for a route's answers: 200 in these media types, and error statuses."""
    refused: dict[int | str, dict[str, Any]] = {
        status: {"description": MEANINGS[status], "content": {_JSON: {"schema": {"$ref": _REF.format(model="Error")}}}}
        for status in sorted({*ALWAYS, *refusals})
    }
    success: dict[str, Any] = {"description": "The answer.", "content": {kind: {"schema": {}} for kind in kinds}}
    return {"responses": {200: success, **refused}}


def named_in_path(parameter: str) -> dict[str, Any]:
    """Return the description of a path with a name in it, which FastAPI would give other errors."""
    return {"parameters": [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]}


def takes(body: type[BaseModel], *refusals: int, kinds: Iterable[str] = (_JSON,)) -> dict[str, Any]:
    """Return decorator arguments for a route with a JSON body."""
    content = {_JSON: {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    return {
        **answers(408, *refusals, kinds=kinds),
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def generates(body: type[BaseModel], *, in_containers: bool = False) -> dict[str, Any]:
    """Return decorator arguments for a generating route, whose answer may be whole or events."""
    containers = (ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE) if in_containers else ()
    return takes(body, *GENERATION, kinds=(_JSON, _EVENTS, *containers))


def publish(
    app: FastAPI, bodies: Sequence[type[BaseModel]], *, groups: Mapping[str, Mapping[str, str]], docs: Mapping[str, str]
) -> None:
    """Serve the description at the application's `openapi_url`, with these models as body schemas.

    `groups` has the summary of each path by its tag, and `docs` the description of each field: by name, or by schema
    and name.
    """

    def description() -> dict[str, Any]:
        if not app.openapi_schema:
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update({**definitions.get("$defs", {}), "Error": _ERROR})
            for group, purposes in groups.items():
                for path in purposes.keys() & schema["paths"].keys():
                    for operation in schema["paths"][path].values():
                        operation.update(tags=[group], summary=purposes[path])
            for declared, known in FIELDS.items():
                _describe_known(schemas[declared.__name__], known, is_nested=declared not in bodies)
            for title, found in schemas.items():
                for name, field in found.get("properties", {}).items():
                    if told := docs.get(f"{title}.{name}", docs.get(name)):
                        field.setdefault("description", told)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = description


def _describe_known(schema: dict[str, Any], known: KnownFields, *, is_nested: bool) -> None:
    """Add the known fields that a schema lacks; a nested object permits no others."""
    properties = schema.setdefault("properties", {})
    for other, own in known.other_names.items():
        properties[other] = {**properties[own], "title": other, "description": f"The same as `{own}`."}
    for name in known.accepted:
        properties[name] = {"description": "Accepted, without effect on the answer."}
    for name, switched_off in known.refused.items():
        properties[name] = {"description": "Not supported.", "enum": [*NOTHING, *switched_off]}
    if is_nested:
        schema["additionalProperties"] = False
