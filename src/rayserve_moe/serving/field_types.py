"""Types of the fields that request bodies are made of: strict, bounded, with sentences that never quote the input.

No schema may use a union or a dictionary with typed keys: their error locations would carry the client's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
_INT32_MAX = 2**31 - 1

Prompt = str | list[int]


class PromptBatch(NamedTuple):
    """One prompt or several of them; `is_batch` when they came as a list, so that a list is to go back."""

    prompts: list[Prompt]
    is_batch: bool


class RequestBody(BaseModel):
    """A JSON object of a request: strict types, unknown fields kept aside, null the same as not given."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: object) -> object:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


def neutral_only(*neutral: object) -> AfterValidator:
    """Accept a feature that is not served only at the values that switch it off."""

    def check(value: object) -> object:
        if value not in neutral:
            raise fault("is not supported yet: leave it out")
        return value

    return AfterValidator(check)


def fault(sentence: str) -> PydanticCustomError:
    """Return the error for a validator to raise; the sentence follows the field's name."""
    return PydanticCustomError("field", "{sentence}", {"sentence": sentence})


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_token_id, value)):
        raise fault("should be a list of token ids, integers that are not negative")
    if not value:
        raise fault("should not be empty")
    return value


def _one_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise fault("should not be empty")
        return value
    return _token_ids(value)


def _several(values: list, one: Callable[[object], Prompt]) -> list[Prompt]:
    if len(values) > MAX_PROMPTS:
        raise fault(f"should hold at most {MAX_PROMPTS} prompts")
    return [one(value) for value in values]


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        kind = type(value[0])
        if not all(isinstance(prompt, kind) for prompt in value):
            raise fault("should hold prompts of one kind, strings or lists of token ids")
        return _several(value, _one_prompt)
    if not isinstance(value, str | list):
        raise fault("should be a string, a list of strings, a list of token ids or a list of such lists")
    return [_one_prompt(value)]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise fault("should be a string or a list of strings, none of them empty")
    return value


def _text_batch(value: object) -> PromptBatch:
    if isinstance(value, list) and value:
        return PromptBatch(_several(value, _text), is_batch=True)
    return PromptBatch([_text(value)], is_batch=False)


def _ids_batch(value: object) -> PromptBatch:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return PromptBatch(_several(value, _token_ids), is_batch=True)
    return PromptBatch([_token_ids(value)], is_batch=False)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
    if not all(isinstance(string, str) and 0 < len(string) <= MAX_STOP_LENGTH for string in strings):
        raise fault(f"should be a string or a list of strings of 1 to {MAX_STOP_LENGTH} characters")
    if len(strings) > MAX_STOP_STRINGS:
        raise fault(f"should hold at most {MAX_STOP_STRINGS} strings")
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(map(_is_token_id, ids)) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise fault(f"should be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(ids)


def _seed(value: int) -> int:
    """Fold 64 bits to the 32 the sampler takes; seeds of 0 to 2**32 - 1 stay themselves."""
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def _top_k(value: int) -> int:
    return max(value, 0)


Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]
TextBatch = Annotated[PromptBatch, PlainValidator(_text_batch)]
IdsBatch = Annotated[PromptBatch, PlainValidator(_ids_batch)]
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop_strings)]
StopTokenIds = Annotated[tuple[int, ...], PlainValidator(_stop_token_ids)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(_seed)]
NumChoices = Annotated[int, Field(ge=1, le=128)]
MaxTokens = Annotated[int, Field(ge=0, le=_INT32_MAX)]
TopK = Annotated[int, Field(ge=-1, le=_INT32_MAX), AfterValidator(_top_k)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
CacheSalt = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, neutral_only(0)]
RepetitionPenalty = Annotated[float, neutral_only(1)]
EmptyObject = Annotated[dict, neutral_only({})]
EmptyList = Annotated[list, neutral_only([])]
FalseOnly = Annotated[bool, neutral_only(False)]
EmptyString = Annotated[str, neutral_only("")]
ZeroOnly = Annotated[int, Field(ge=0), neutral_only(0)]
