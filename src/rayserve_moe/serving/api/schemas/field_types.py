"""Field types of request bodies: strict and bounded, with error sentences that never quote the input.

No schema may use a union or a dictionary with typed keys: their error locations would contain the client's words. Types
with custom validation also declare their JSON schema, for the published API description.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model, model_validator
from pydantic_core import PydanticCustomError

from rayserve_moe.requests.fields import INT32_MAX, LISTED_IDS, LOGPROBS_MODE, MAX_TOP_LOGPROBS, RequestField, declared

MAX_CHOICES = 4096
MAX_RID = 256
_JSON_DIALECTS = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}

Schema = TypeVar("Schema", bound=BaseModel)
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
ListedIds = Annotated[Any, PlainValidator(LISTED_IDS.read), WithJsonSchema(dict(LISTED_IDS.schema))]
LogprobsMode = Annotated[Any, PlainValidator(LOGPROBS_MODE.read), WithJsonSchema(dict(LOGPROBS_MODE.schema))]
MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_RID)]
RoutingFormat = Literal["sglang", "nested", "npy", "packed"]
ForcedRouting = Annotated[Any, WithJsonSchema(_JSON_DIALECTS)]
"""Routing to replay, in any JSON dialect; a batch has a list with an entry per prompt, null for none."""


def record_fields(
    dialect: str, record: Any, *, without: Collection[str] = ()
) -> Callable[[type[Schema]], type[Schema]]:
    """Return a decorator that adds the fields that a record declares for a dialect, unless the schema declares them."""

    def with_fields(schema: type[Schema]) -> type[Schema]:
        return extended(schema, _typed_fields(dialect, record, without={*schema.model_fields, *without}))

    return with_fields


def extended(schema: type[Schema], fields: dict[str, Any]) -> type[Schema]:
    """Return a schema with additional fields in pydantic's form, by name."""
    return create_model(
        schema.__name__, __base__=schema, __doc__=schema.__doc__, __module__=schema.__module__, **fields
    )


def _typed_fields(dialect: str, record: Any, *, without: Collection[str]) -> dict[str, Any]:
    """Return a record's fields of a dialect in pydantic's form, by name."""
    named = {field.names[dialect]: field for field in declared(record) if dialect in field.names}
    return {name: _typed(field) for name, field in named.items() if name not in without}


def _typed(field: RequestField) -> tuple[Any, Any]:
    """Return the pydantic type of a record's field, and its default."""
    schema = dict(field.values.schema)
    if field.default is None:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = Field(default_factory=tuple) if schema.get("type") == "object" else field.default
    return Annotated[Any, PlainValidator(field.values.read), WithJsonSchema(schema)], default


class RequestBody(BaseModel):
    """JSON object of a request: strict types, unknown fields ignored, null equal to missing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: object) -> object:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


def fault(sentence: str) -> PydanticCustomError:
    """Return the error for a validator to raise; the sentence follows the field's name."""
    return PydanticCustomError("field", "{sentence}", {"sentence": sentence})


class RoutingFields(RequestBody):
    """Streaming of the answer, the form of index rows, and rows to replay."""

    stream: bool = False
    stream_routed_experts: bool = False
    forced_routed_experts: ForcedRouting = None
    forced_indexer_topk: ForcedRouting = None
    forced_router_gates: ForcedRouting = None
    indexer_topk_format: Literal["sglang", "packed"] = "sglang"

    @model_validator(mode="after")
    def _rows_stream_in_a_stream(self) -> Self:
        if self.stream_routed_experts and not self.stream:
            raise fault("`stream_routed_experts` is only for requests with `stream` true")
        return self
