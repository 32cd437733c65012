"""What a parsed body says, held against the table of known fields: what is to be computed, and what nobody knows."""

from __future__ import annotations

import difflib
from typing import Any

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.schemas.known_fields import NOTHING, KnownFields

_LONGEST_COMPARED_NAME = 64


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
    """The same of a declared object, or of each in a list; what is neither is for the schema to refuse."""
    if isinstance(value, list):
        return [_within(each, known, f"{path}.{place}") for place, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    taken, unknown = _taken(value, known, path=f"{path}.")
    if unknown:
        (nearest,) = difflib.get_close_matches(unknown[0][:_LONGEST_COMPARED_NAME], known.names, cutoff=0.0, n=1)
        raise ApiError(400, f"`{path}` has an unknown field: the nearest known one is `{nearest}`", param=path)
    return taken
