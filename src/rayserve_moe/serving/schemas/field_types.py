"""Types of the fields that request bodies are made of: strict, bounded, with sentences that never quote the input.

No schema may use a union or a dictionary with typed keys: their error locations would carry the client's words. Types
that check by themselves state their JSON schema too, for the published description of the API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 256
MAX_BIAS = 100
LONGEST_RID = 256
INT32_MAX = 2**31 - 1

_DIGITS_OF_INT32 = 10


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


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be the id of a token, of whatever vocabulary."""
    return type(value) is int and 0 <= value <= INT32_MAX


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
    if not all(isinstance(string, str) and 0 < len(string) <= MAX_STOP_LENGTH for string in strings):
        raise fault(f"should be a string or a list of strings of 1 to {MAX_STOP_LENGTH} characters")
    if len(strings) > MAX_STOP_STRINGS:
        raise fault(f"should hold at most {MAX_STOP_STRINGS} strings")
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(map(is_token_id, ids)) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise fault(f"should be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(ids)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(map(_is_written_token_id, value)):
        raise fault("should be an object whose keys are token ids in decimal digits")
    if not all(map(_is_bias, value.values())):
        raise fault(f"should hold numbers from {-MAX_BIAS} to {MAX_BIAS}")
    if len(value) > MAX_BIASES:
        raise fault(f"should hold at most {MAX_BIASES} token ids")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _is_written_token_id(key: str) -> bool:
    is_number = key.isascii() and key.isdigit() and len(key) <= _DIGITS_OF_INT32
    return is_number and str(int(key)) == key and int(key) <= INT32_MAX


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_BIAS <= value <= MAX_BIAS


def _seed(value: int) -> int:
    """Fold 64 bits to the 32 the sampler takes; seeds of 0 to 2**32 - 1 stay themselves."""
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def _top_k(value: int) -> int:
    return max(value, 0)


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_BIASES_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASES,
}

StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_stop_strings),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}),
]
StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_stop_token_ids),
    WithJsonSchema({"anyOf": [_ID_SCHEMA, {"type": "array", "items": _ID_SCHEMA, "maxItems": MAX_STOP_TOKEN_IDS}]}),
]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias), WithJsonSchema(_BIASES_SCHEMA)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(_seed)]
NumChoices = Annotated[int, Field(ge=1, le=128)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=20)]
MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
MinTokens = MaxTokens
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(_top_k)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
CacheSalt = Annotated[str, Field(max_length=256)]
RequestId = Annotated[str, Field(min_length=1, max_length=LONGEST_RID)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
RoutingFormat = Literal["sglang", "nested", "npy", "packed"]
