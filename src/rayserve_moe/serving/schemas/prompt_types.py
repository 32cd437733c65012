"""Types of prompt fields: one or several prompts, as text or as token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from rayserve_moe.request_fields import INT32_MAX, is_token_id
from rayserve_moe.serving.schemas.field_types import fault

MAX_PROMPTS = 1024

Prompt = str | list[int]


class PromptBatch(NamedTuple):
    """One prompt or several of them; `is_batch` when they came as a list, so that a list is to go back."""

    prompts: list[Prompt]
    is_batch: bool


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(map(is_token_id, value)):
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


def _several_of(schema: dict) -> dict:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_PROMPTS}


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_EITHER = [_TEXT_SCHEMA, _several_of(_TEXT_SCHEMA), _IDS_SCHEMA, _several_of(_IDS_SCHEMA)]

TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]
Prompts = Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema({"anyOf": _EITHER})]
TextBatch = Annotated[PromptBatch, PlainValidator(_text_batch), WithJsonSchema({"anyOf": _EITHER[:2]})]
IdsBatch = Annotated[PromptBatch, PlainValidator(_ids_batch), WithJsonSchema({"anyOf": _EITHER[2:]})]
