"""Types of the fields that request bodies are made of: strict, bounded, with sentences that never quote the input.

No schema may use a union or a dictionary with typed keys: their error locations would carry the client's words. Types
that check by themselves state their JSON schema too, for the published description of the API.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model, model_validator
from pydantic_core import PydanticCustomError

from rayserve_moe.requests.fields import INT32_MAX, LISTED_IDS, LOGPROBS_MODE, MAX_TOP_LOGPROBS, RequestField, declared

MAX_CHOICES = 4096
LONGEST_RID = 256
_JSON_DIALECTS = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}

Schema = TypeVar("Schema", bound=BaseModel)
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
ListedIds = Annotated[Any, PlainValidator(LISTED_IDS.read), WithJsonSchema(dict(LISTED_IDS.schema))]
LogprobsMode = Annotated[Any, PlainValidator(LOGPROBS_MODE.read), WithJsonSchema(dict(LOGPROBS_MODE.schema))]
MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
RequestId = Annotated[str, Field(min_length=1, max_length=LONGEST_RID)]
RoutingFormat = Literal["sglang", "nested", "npy", "packed"]
ForcedRouting = Annotated[Any, WithJsonSchema(_JSON_DIALECTS)]
"""Routing to replay, in any JSON dialect; a batch of prompts has a list of as many, null where it has none."""


def record_fields(
    dialect: str, record: Any, *, without: Collection[str] = ()
) -> Callable[[type[Schema]], type[Schema]]:
    """Decorate a schema with the fields that a record declares for a dialect, but for those that it states itself."""

    def extended(schema: type[Schema]) -> type[Schema]:
        return _extended(schema, _typed_fields(dialect, record, without={*schema.model_fields, *without}))

    return extended


def unchecked_fields(names: Collection[str]) -> Callable[[type[Schema]], type[Schema]]:
    """Decorate a schema with fields of any value, None if not given, which another schema checks."""
    return lambda schema: _extended(schema, dict.fromkeys(names, (Any, None)))


def _extended(schema: type[Schema], fields: dict[str, Any]) -> type[Schema]:
    """Return a schema with more fields, by name as pydantic takes them."""
    return create_model(
        schema.__name__, __base__=schema, __doc__=schema.__doc__, __module__=schema.__module__, **fields
    )


def _typed_fields(dialect: str, record: Any, *, without: Collection[str]) -> dict[str, Any]:
    """Return the fields that a record declares for a dialect as pydantic takes them, by name."""
    named = {field.names[dialect]: field for field in declared(record) if dialect in field.names}
    return {name: _typed(field) for name, field in named.items() if name not in without}


def _typed(field: RequestField) -> tuple[Any, Any]:
    """The type of a record's field for pydantic, and its default."""
    schema = dict(field.values.schema)
    if field.default is None:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = Field(default_factory=tuple) if schema.get("type") == "object" else field.default
    return Annotated[Any, PlainValidator(field.values.read), WithJsonSchema(schema)], default


class RequestBody(BaseModel):
    """A JSON object of a request: strict types, what is unknown ignored, null the same as not given."""

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
    """When the answer comes, and routing to be replayed."""

    stream: bool = False
    stream_routed_experts: bool = False
    forced_routed_experts: ForcedRouting = None

    @model_validator(mode="after")
    def _rows_stream_in_a_stream(self) -> Self:
        if self.stream_routed_experts and not self.stream:
            raise fault("`stream_routed_experts` is only for requests with `stream` true")
        return self
