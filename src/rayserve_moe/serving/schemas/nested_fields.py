"""Names in the objects within bodies of `/v1/messages` and `/v1/responses`, which are read as plain JSON.

Content of messages, input items, schemas and `metadata` may hold any names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class NestedFields(NamedTuple):
    """Names that are computed, those without effect, and those refused, each with values that switch it off.

    Where there are `kinds`, only objects with such a `type` are looked at: the route refuses others.
    """

    computed: str
    accepted: str = ""
    refused: Mapping[str, tuple[Any, ...]] = {}
    within: Mapping[str, NestedFields] = {}
    kinds: tuple[str | None, ...] = ()


_TOOLS = NestedFields(
    "type name description input_schema",
    "cache_control strict eager_input_streaming",
    {"defer_loading": (False,), "input_examples": (), "allowed_callers": (["direct"],)},
    kinds=(None, "custom"),
)
_MESSAGES = {
    "thinking": NestedFields("type budget_tokens", refused={"display": ("summarized",)}),
    "output_config": NestedFields("effort format", within={"format": NestedFields("type schema", "name strict")}),
    "tools": _TOOLS,
    "tool_choice": NestedFields("type name disable_parallel_tool_use"),
}
_RESPONSES = {
    "reasoning": NestedFields("effort", "summary generate_summary", {"context": ("auto",), "mode": ("standard",)}),
    "text": NestedFields(
        "format",
        refused={"verbosity": ("medium",)},
        within={"format": NestedFields("type name schema strict description")},
    ),
    "tools": NestedFields(
        "type name description parameters strict",
        refused={
            "defer_loading": (False,),
            "allowed_callers": (["direct"],),
            "async": (False,),
            "output_schema": (),
        },
        kinds=("function",),
    ),
    "tool_choice": NestedFields("type name", kinds=("function",)),
}
NESTED_FIELDS: Mapping[str, Mapping[str, NestedFields]] = {"m": _MESSAGES, "mc": _MESSAGES, "r": _RESPONSES}
"""By object of `known_fields`, then by field."""
