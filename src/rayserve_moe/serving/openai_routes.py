"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.answers import ChoiceResult
from rayserve_moe.requests import GenerationRequest
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.json_body import read_body
from rayserve_moe.serving.openai_answers import CHAT, COMPLETION, AnswerWriter, Dialect, new_answer_id
from rayserve_moe.serving.openai_schemas import ChatBody, ChatMessage, CompletionBody
from rayserve_moe.serving.request_streams import RequestStreams, prompt_ids_of
from rayserve_moe.serving.streaming import EventStream, json_answer, while_connected
from rayserve_moe.text.chat import ChatTemplateError, encode_chat

_DEFAULT_COMPLETION_TOKENS = 16


def openai_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, ignored=state.ignored_fields)
        _check_model(state, body.model)
        prompts = await prompt_ids_of(state, body.prompt, param="prompt")
        return await _answer(state, request, body, dialect=COMPLETION, prompts=prompts)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, ignored=state.ignored_fields)
        _check_model(state, body.model)
        prompt_ids = await _chat_ids(state, body.messages)
        return await _answer(state, request, body, dialect=CHAT, prompts=[prompt_ids])

    return router


def _check_model(state: ApiState, model: str | None) -> None:
    if model not in (None, state.card.name):
        raise ApiError(
            404, f"no such model: this server serves `{state.card.name}`", param="model", code="model_not_found"
        )


async def _chat_ids(state: ApiState, messages: Sequence[ChatMessage]) -> np.ndarray:
    plain = [message.model_dump(exclude_none=True) for message in messages]
    encode = partial(encode_chat, state.tokenizer, plain)
    try:
        ids = await asyncio.get_running_loop().run_in_executor(state.tokenizing, encode)
    except ChatTemplateError as error:
        raise ApiError(400, "the checkpoint's chat template cannot render these messages", param="messages") from error
    return np.asarray(ids, np.int32)


async def _answer(
    state: ApiState,
    http_request: Request,
    body: CompletionBody | ChatBody,
    *,
    dialect: Dialect,
    prompts: Sequence[np.ndarray],
) -> Response:
    answer_id = new_answer_id(dialect)
    requests = [
        GenerationRequest(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{position}",
            prompt_ids=prompt_ids,
            sampling=body.sampling(_num_new_tokens(state, body, len(prompt_ids)), body.seed),
            return_routed_experts=body.return_routed_experts,
            cache_salt=body.cache_salt,
            incremental=body.stream or bool(body.stop),
        )
        for position, prompt_ids in enumerate(prompts)
    ]
    param_names = {"prompt": "messages"} if dialect is CHAT else None
    streams = RequestStreams(state, requests, param_names=param_names)
    writer = AnswerWriter(
        dialect,
        answer_id,
        card=state.card,
        tokenizer=state.tokenizer if body.wants_logprobs else None,
        request_of_choice=streams.request_of_choice,
    )
    if body.stream:
        return EventStream(_events(streams, writer, body.wants_usage_event), streams.close)
    try:
        return json_answer(writer.whole(await while_connected(http_request.receive, streams.results())))
    finally:
        streams.close()


def _num_new_tokens(state: ApiState, body: CompletionBody | ChatBody, num_prompt_tokens: int) -> int:
    """Where no limit was given, take the route's default, but no more than the context has room for."""
    room = max(1, state.card.max_model_len - num_prompt_tokens)
    if isinstance(body, CompletionBody):
        return min(_DEFAULT_COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    return room if body.new_token_limit is None else body.new_token_limit


async def _events(streams: RequestStreams, writer: AnswerWriter, with_usage: bool) -> AsyncGenerator[dict, None]:
    """Yield one event per choice and group of deltas; while token counts are still to come, they are null."""
    results = [ChoiceResult() for _ in streams.request_of_choice]
    async for group in streams.groups():
        news: dict[int, ChoiceResult] = {}
        for choice, delta in group:
            results[choice].add(delta)
            news.setdefault(choice, ChoiceResult()).add(delta)
        for choice, added in news.items():
            event = writer.chunk(choice, added)
            yield {**event, "usage": None} if with_usage else event
    if with_usage:
        yield writer.usage_event(results)
