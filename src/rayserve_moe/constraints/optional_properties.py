"""Limit of optional properties that can come next at a point of a schema: each widens a row of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rayserve_moe.constraints.refusals import objects_in, shown_path

MAX_OPTIONAL = 1_000
"""Maximum number. The time of a mask grows with its square: 3 ms for 1,000, 10 ms for 2,000, 45 ms for 4,000."""
ITEMS_PER_OPTIONAL = 4
"""Items of a parser row per optional property."""
_OF_A_BRANCH = 2
"""Additional count of an object that is an alternative: it takes 7 items."""
_BRANCHES = ("anyOf", "oneOf", "allOf")


def excess_of(schema: Mapping[str, Any]) -> str | None:
    """Return a sentence with the place and the count if a schema exceeds MAX_OPTIONAL, else None."""
    widths: dict[int, int] = {}
    for inner, path in objects_in(schema):
        if (width := _width(inner, schema, widths)) > MAX_OPTIONAL:
            keyword = next(name for name in ("properties", *_BRANCHES, "$ref") if name in inner)
            return (
                f"`{keyword}` at {shown_path(path)} amounts to {width} optional properties that can come next, "
                f"more than {MAX_OPTIONAL}"
            )
    return None


def _width(schema: Any, root: Mapping[str, Any], widths: dict[int, int]) -> int:
    """Return the maximum number of optional properties in a row, including alternatives; a cycle counts once."""
    if not isinstance(schema, Mapping):
        return 0
    if id(schema) not in widths:
        widths[id(schema)] = 0
        branches = [one for name in _BRANCHES if isinstance(given := schema.get(name), list) for one in given]
        within = [width + _OF_A_BRANCH for one in branches if (width := _width(one, root, widths))]
        widths[id(schema)] = _max_run(schema) + sum(within) + _width(_target(schema.get("$ref"), root), root, widths)
    return widths[id(schema)]


def _max_run(schema: Mapping[str, Any]) -> int:
    """Return the longest run of optional properties between required properties."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    needed = frozenset(filter(lambda name: isinstance(name, str), required)) if isinstance(required, list) else ()
    runs = groupby(properties, key=lambda name: name in needed)
    return max((len(list(run)) for is_needed, run in runs if not is_needed), default=0)


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within the schema, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
