"""Types of prompt fields: a prompt or several, as text or token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from rayserve_moe.requests.fields import INT32_MAX, is_token_id
from rayserve_moe.serving.api.schemas.field_types import fault

MAX_PROMPTS = 1024

Prompt = str | list[int]


class PromptBatch(NamedTuple):
    """Prompts of a request."""

    prompts: list[Prompt]
    is_batch: bool
    """True if they were given as a list; the answer is then a list."""


def _listed_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(map(is_token_id, value)):
        raise fault("should be a list of token ids, integers that are not negative")
    return value


def _token_ids(value: object) -> list[int]:
    if not (ids := _listed_ids(value)):
        raise fault("should not be empty")
    return ids


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


def _any_texts(value: object) -> PromptBatch:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise fault("should be a string or a list of strings")
    return PromptBatch(_several(texts, str), is_batch=isinstance(value, list))


def _any_ids(value: object) -> PromptBatch:
    is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return PromptBatch(_several(value if is_batch else [value], _listed_ids), is_batch=is_batch)


def _several_of(schema: dict) -> dict:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_PROMPTS}


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_ANY_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
_IDS_SCHEMA = {**_ANY_IDS_SCHEMA, "minItems": 1}
_EITHER = [_TEXT_SCHEMA, _several_of(_TEXT_SCHEMA), _IDS_SCHEMA, _several_of(_IDS_SCHEMA)]

TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]
Prompts = Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema({"anyOf": _EITHER})]
TextBatch = Annotated[PromptBatch, PlainValidator(_text_batch), WithJsonSchema({"anyOf": _EITHER[:2]})]
IdsBatch = Annotated[PromptBatch, PlainValidator(_ids_batch), WithJsonSchema({"anyOf": _EITHER[2:]})]

_ANY_TEXTS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS}]
_ANY_IDS = [_ANY_IDS_SCHEMA, _several_of(_ANY_IDS_SCHEMA)]
AnyTexts = Annotated[PromptBatch, PlainValidator(_any_texts), WithJsonSchema({"anyOf": _ANY_TEXTS})]
AnyIds = Annotated[PromptBatch, PlainValidator(_any_ids), WithJsonSchema({"anyOf": _ANY_IDS})]
"""Types for routes that generate nothing: every prompt may be empty."""
