"""Bodies of `/tokenize`, `/detokenize` and `/finish_session`, shared by vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rayserve_moe.serving.api.schemas.field_types import RequestBody, fault
from rayserve_moe.serving.api.schemas.openai import ChatMessage, TemplateFields
from rayserve_moe.serving.api.schemas.prompt_types import AnyIds, AnyTexts


class TokenizeBody(TemplateFields):
    """Text, several texts as in SGLang, or messages for the template. By default special tokens are added to texts."""

    model: str | None = None
    prompt: AnyTexts | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise fault("give exactly one of `prompt` and `messages`")
        return self


class SessionOptions(RequestBody):
    """Options of `/finish_session` and `/close_session`: a session of the caller, under its cache salt."""

    session_id: Annotated[str, Field(min_length=1, max_length=4096)]
    cache_salt: Annotated[str, Field(max_length=256)] = ""


class DetokenizeBody(RequestBody):
    """Token ids, or several lists. By default special tokens appear in vLLM's `prompt` but not in SGLang's `text`."""

    model: str | None = None
    tokens: AnyIds
    skip_special_tokens: bool | None = None
