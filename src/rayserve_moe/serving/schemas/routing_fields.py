"""The fields about routed experts that all generating routes share."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema, model_validator

from rayserve_moe.serving.schemas.field_types import RequestBody, fault

_JSON_DIALECTS = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}

ForcedRouting = Annotated[Any, WithJsonSchema(_JSON_DIALECTS)]
"""Routing to replay, in any JSON dialect; a batch of prompts brings a list of as many, null where it has none."""
RowStart = Annotated[int, Field(ge=0)]


class RoutingFields(RequestBody):
    """When rows are to come back, and which are to be replayed."""

    stream: bool = False
    stream_routed_experts: bool = False
    forced_routed_experts: ForcedRouting = None

    @model_validator(mode="after")
    def _rows_stream_in_a_stream(self) -> Self:
        if self.stream_routed_experts and not self.stream:
            raise fault("`stream_routed_experts` is only for requests with `stream` true")
        return self
