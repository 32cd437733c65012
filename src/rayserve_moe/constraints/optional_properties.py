"""How many optional properties of a schema can come next at one place: each widens a row of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rayserve_moe.constraints.refusals import objects_in, shown_path

MOST_OPTIONAL = 1_000
"""The time of a mask grows with their square: 3 ms for 1,000, 10 ms for 2,000, 45 ms for 4,000."""
ITEMS_PER_OPTIONAL = 4
"""Of a row of the parser."""
_OF_A_BRANCH = 2
"""What an object that is one of several counts as besides its properties: it takes 7 items."""
_BRANCHES = ("anyOf", "oneOf", "allOf")


def excess_of(schema: Mapping[str, Any]) -> str | None:
    """Return where a schema has more of them than MOST_OPTIONAL, and how many; None where it has not."""
    widths: dict[int, int] = {}
    for inner, path in objects_in(schema):
        if (width := _width(inner, schema, widths)) > MOST_OPTIONAL:
            keyword = next(name for name in ("properties", *_BRANCHES, "$ref") if name in inner)
            return (
                f"`{keyword}` at {shown_path(path)} amounts to {width} optional properties that can come next, "
                f"more than {MOST_OPTIONAL}"
            )
    return None


def _width(schema: Any, root: Mapping[str, Any], widths: dict[int, int]) -> int:
    """Optional properties in a row, of the object itself or of what it may be instead; what refers to itself once."""
    if not isinstance(schema, Mapping):
        return 0
    if id(schema) not in widths:
        widths[id(schema)] = 0
        branches = [one for name in _BRANCHES if isinstance(given := schema.get(name), list) for one in given]
        within = [width + _OF_A_BRANCH for one in branches if (width := _width(one, root, widths))]
        widths[id(schema)] = (
            _longest_run(schema) + sum(within) + _width(_target(schema.get("$ref"), root), root, widths)
        )
    return widths[id(schema)]


def _longest_run(schema: Mapping[str, Any]) -> int:
    """Of optional properties between two that are required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    needed = frozenset(filter(lambda name: isinstance(name, str), required)) if isinstance(required, list) else ()
    runs = groupby(properties, key=lambda name: name in needed)
    return max((len(list(run)) for is_needed, run in runs if not is_needed), default=0)


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema refers to, where it is one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
