"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.request_builder import build_request
from rayserve_moe.request_fields import OPENAI
from rayserve_moe.requests import GenerationRequest
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates
from rayserve_moe.serving.responses.answering import respond
from rayserve_moe.serving.responses.openai import OpenAIWriter
from rayserve_moe.serving.responses.request_streams import open_streams
from rayserve_moe.serving.routes.request_parts import check_model, encoded, forced_routing_of, prompt_ids_of
from rayserve_moe.serving.schemas.openai import ChatBody, ChatMessage, CompletionBody
from rayserve_moe.text.chat import ChatTemplateError, encode_chat

_BYTES_PER_MESSAGE = 64
_CHAT_NAMES = {"prompt": "messages"}
_COMPLETION_NAMES = {"top_logprobs": "logprobs"}


def openai_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()

    @router.post("/v1/completions", **generates(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, admission=state.admission)
        check_model(state, body.model)
        prompts = await prompt_ids_of(state, body.prompt, param="prompt", request=request)
        return await _answer(state, request, body=body, prompts=prompts)

    @router.post("/v1/chat/completions", **generates(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, admission=state.admission)
        check_model(state, body.model)
        prompt_ids = await _chat_ids(state, body.messages, request)
        return await _answer(state, request, body=body, prompts=[prompt_ids])

    return router


async def _chat_ids(state: ApiState, messages: Sequence[ChatMessage], request: Request) -> np.ndarray:
    size = sum(_BYTES_PER_MESSAGE + _num_characters(message.content) for message in messages)
    encode = partial(_encode_chat, state, messages)
    with state.admission.holding(size):
        return await state.admission.run(lambda _: encode(), size=size, receive=request.receive)


def _num_characters(content: str | list[dict] | None) -> int:
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")


def _encode_chat(state: ApiState, messages: Sequence[ChatMessage]) -> np.ndarray:
    plain = [message.model_dump(exclude_none=True) for message in messages]
    try:
        ids = encoded(partial(encode_chat, state.tokenizer, plain), state.card, param="messages")
    except ChatTemplateError as error:
        raise ApiError(400, "the checkpoint's chat template cannot render these messages", param="messages") from error
    return np.asarray(ids, np.int32)


async def _answer(
    state: ApiState, http_request: Request, *, body: CompletionBody | ChatBody, prompts: Sequence[np.ndarray]
) -> Response:
    prefix, names = ("chatcmpl", _CHAT_NAMES) if isinstance(body, ChatBody) else ("cmpl", _COMPLETION_NAMES)
    answer_id = body.rid or f"{prefix}-{uuid.uuid4().hex}"
    requests = await _requests(state, body, answer_id=answer_id, prompts=prompts)
    streams = await open_streams(state, requests, param_names=names)
    writer = OpenAIWriter(state, body, answer_id=answer_id, request_of_choice=streams.request_of_choice)
    return await respond(state, http_request, streams=streams, writer=writer, stream=body.stream)


async def _requests(
    state: ApiState, body: CompletionBody | ChatBody, *, answer_id: str, prompts: Sequence[np.ndarray]
) -> list[GenerationRequest]:
    """Return the engine's requests. Where no limit is given, a chat runs to the end of the context."""
    given = dict(body)
    if isinstance(body, ChatBody):
        limits = (body.max_completion_tokens, given["max_tokens"], max(1, state.card.max_model_len - len(prompts[0])))
        given["max_tokens"] = next(limit for limit in limits if limit is not None)
    forced = await forced_routing_of(state, body.forced_routed_experts, prompts=prompts, is_batch=len(prompts) > 1)
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{position}" for position in range(len(prompts))]
    return [
        build_request(prompt_ids, given, dialect=OPENAI, card=state.card, request_id=request_id, forced=rows)
        for request_id, prompt_ids, rows in zip(ids, prompts, forced, strict=True)
    ]
