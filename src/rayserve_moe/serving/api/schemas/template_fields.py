"""Fields of a chat that the checkpoint's template receives."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.serving.api.schemas.field_types import RequestBody, fault


def _check_kwargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fault("should be an object")
    return value


def _check_documents(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(map(_is_document, value)):
        raise fault("should be a list of objects whose values are strings")
    return value


def _is_document(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_DOCUMENTS_SCHEMA = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "string"}}}

TemplateKwargs = Annotated[dict[str, Any], PlainValidator(_check_kwargs), WithJsonSchema({"type": "object"})]
Documents = Annotated[list[dict[str, str]], PlainValidator(_check_documents), WithJsonSchema(_DOCUMENTS_SCHEMA)]


class TemplateFields(RequestBody):
    """Template inputs besides messages. A prompt opens the assistant's answer unless it continues the last message."""

    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _opens_or_continues(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise fault("give one of `add_generation_prompt` and `continue_final_message`")
        return self

    @property
    def opens_answer(self) -> bool:
        """Return True if the prompt ends with the beginning of the assistant's message."""
        if self.add_generation_prompt is not None:
            return self.add_generation_prompt
        return not self.continue_final_message

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the template's variables besides messages."""
        own = {"documents": self.documents, "continue_final_message": self.continue_final_message or None}
        return {
            **{name: value for name, value in own.items() if value is not None},
            **(self.chat_template_kwargs or {}),
        }
