"""Fields that bodies of other dialects share with a chat, declared once.

Such bodies become chats, whose own body validates these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from rayserve_moe.requests.fields import OPENAI, declared
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.serving.api.schemas.field_types import Schema, extended
from rayserve_moe.serving.api.schemas.openai import ChatBody

_LEFT_OUT = {"n", "max_tokens"}
"""Sampling parameters that these dialects lack, or name otherwise: each answer is a single choice."""
_SAMPLING = dict.fromkeys(field.names[OPENAI] for field in declared(SamplingParams) if OPENAI in field.names)
SHARED = (
    *(name for name in _SAMPLING if name not in _LEFT_OUT),
    *("cache_salt", "priority", "chat_template_kwargs", "structured_outputs", "include_reasoning"),
    "thinking_token_budget",
)
"""Fields with the same name and meaning as in a chat."""


def chat_like(*, without: Collection[str] = ()) -> Callable[[type[Schema]], type[Schema]]:
    """Return a decorator that adds the shared fields, unless the schema declares them; `without` have other names."""
    described = ChatBody.model_json_schema()["properties"]

    def of_chats(schema: type[Schema]) -> type[Schema]:
        names = [name for name in SHARED if name not in {*schema.model_fields, *without}]
        return extended(schema, {name: (Annotated[Any, WithJsonSchema(described[name])], None) for name in names})

    return of_chats


def shared_fields(body: BaseModel) -> dict[str, Any]:
    """Return the given shared fields of a body, for its chat."""
    return {name: value for name, value in body if name in SHARED and value is not None}
