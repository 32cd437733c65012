"""Prompt of a chat: the rendered template, or the given ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from rayserve_moe.config.given_files import one_line
from rayserve_moe.serving.api.routes.request_parts import encoded, prompt_ids_of, truncation_of
from rayserve_moe.serving.api.schemas.openai import ChatBody
from rayserve_moe.serving.api.schemas.text_tokens import TokenizeBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.text.chat import ChatTemplateError, ReservedOptionError, encode_chat, template_text
from rayserve_moe.text.chat_output import ChatOutput

_BYTES_PER_MESSAGE = 64


async def chat_ids(state: ApiState, body: ChatBody, *, request: Request) -> np.ndarray:
    """Return the prompt as int32 ids.

    Raises: ApiError 400 for messages or options that the template rejects, and for a prompt longer than the context.
    """
    if body.offered_tools:
        _check_tools(state.chat_output)
    if body.input_ids is not None:
        cut = truncation_of(state, body)
        (ids,) = await prompt_ids_of(state, [body.input_ids], param="input_ids", request=request, truncation=cut)
        return ids
    return await rendered_ids(state, body, request=request)


async def rendered_ids(state: ApiState, body: ChatBody | TokenizeBody, *, request: Request) -> np.ndarray:
    """Return the messages rendered by the template, as int32 ids."""
    size = sum(_BYTES_PER_MESSAGE + _num_characters(message.content) for message in body.messages or ())
    size += sum(len(str(tool)) for tool in _seen_tools(state, body))
    size += sum(len(text) for document in body.documents or () for text in document.values())
    with state.admission.holding(size):
        return await state.admission.run(lambda _: _rendered(state, body), size=size, receive=request.receive)


def _seen_tools(state: ApiState, body: ChatBody | TokenizeBody) -> list[dict[str, Any]]:
    """Return the tools for the template, including tools that may not be called unless a setting excludes them."""
    if not isinstance(body, ChatBody):
        return []
    return body.offered_tools if state.server.exclude_tools_when_tool_choice_none else body.tools


def _options(state: ApiState, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the template's variables.

    Raises: ApiError 400 for a reasoning effort that the template does not use.
    """
    effort = body.reasoning_options if isinstance(body, ChatBody) else {}
    if effort and not any(name in template_text(state.tokenizer) for name in effort):
        raise ApiError(400, "the checkpoint's chat template knows no `reasoning_effort`", param="reasoning_effort")
    return template_options(body)


def template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the template's variables from a body, unchecked."""
    return (body.reasoning_options if isinstance(body, ChatBody) else {}) | body.template_options


def _check_tools(output: ChatOutput) -> None:
    """Raise ApiError 400 if the template omits tools, or if calls cannot be separated from content."""
    if not output.takes_tools:
        raise ApiError(400, "the checkpoint's chat template has no place for `tools`", param="tools")
    if output.format.calls is None:
        message = "how this checkpoint writes tool calls is not known: name a parser by the setting `tool_call_parser`"
        raise ApiError(400, f"`tools`: {message}", param="tools")


def _num_characters(content: str | list[dict] | None) -> int:
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")


def _rendered(state: ApiState, body: ChatBody | TokenizeBody) -> np.ndarray:
    messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
    encode = partial(
        encode_chat,
        state.tokenizer,
        messages,
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=body.opens_answer,
        tools=_seen_tools(state, body),
        template_kwargs=_options(state, body),
    )
    try:
        cut = truncation_of(state, body) if isinstance(body, ChatBody) else None
        return np.asarray(encoded(encode, state.card, param="messages", truncation=cut), np.int32)
    except ReservedOptionError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from error
    except ChatTemplateError as error:
        raise ApiError(400, one_line(str(error)), param="messages") from error
