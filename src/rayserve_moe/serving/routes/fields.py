"""`/v1/fields`: every request field of every route, and what comes of it, for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer
from rayserve_moe.serving.routes.models import package_version
from rayserve_moe.serving.schemas.known_fields import NOTHING, PLACES, KnownFields, known_fields, plain_objects


def fields_router() -> APIRouter:
    """Return the route."""
    router = APIRouter()
    told = {"version": package_version(), "switched_off_by": list(NOTHING), "objects": list(_objects())}

    @router.get("/v1/fields", **answers())
    async def fields() -> Response:
        return json_answer(told)

    return router


def _objects() -> Iterator[dict[str, Any]]:
    """The JSON objects of requests: where each stands, and its fields by name."""
    for key, (routes, place) in PLACES.items():
        yield {"routes": list(routes), "object": place, "fields": _fields(known_fields(key))}
        for name, known in plain_objects(key).items():
            yield {"routes": list(routes), "object": name, "fields": _fields(known)}


def _fields(known: KnownFields) -> dict[str, dict[str, Any]]:
    return {
        **{name: {"standing": "computed"} for name in sorted(known.computed)},
        **{name: {"standing": "computed", "same_as": own} for name, own in sorted(known.other_names.items())},
        **{name: {"standing": "accepted"} for name in sorted(known.accepted)},
        **{
            name: {"standing": "refused", "also_switched_off_by": list(values)}
            for name, values in sorted(known.refused.items())
        },
    }
