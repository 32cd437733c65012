"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect, over the chats of this server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.middleware.json_body import chat_from, read_body, refusals_translated
from rayserve_moe.serving.openapi import GENERATION, generates, takes
from rayserve_moe.serving.responses.answering import respond, typed_events
from rayserve_moe.serving.responses.messages import MessagesWriter
from rayserve_moe.serving.responses.streaming import json_answer
from rayserve_moe.serving.routes.chat_prompt import chat_ids
from rayserve_moe.serving.routes.openai import opened
from rayserve_moe.serving.routes.request_parts import check_model
from rayserve_moe.serving.schemas.messages import CHAT_NAMES, CountTokensBody, MessagesBody, chat_fields


def messages_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()

    @router.post("/v1/messages", **generates(MessagesBody))
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody, admission=state.admission)
        check_model(state, body.model)
        with refusals_translated(CHAT_NAMES):
            chat = chat_from(chat_fields(body))
            prompt_ids = await chat_ids(state, chat, request=request)
            streams, inner = await opened(state, chat, prompts=[prompt_ids])
        writer = MessagesWriter(inner, streams.request_of_choice[0], model=state.card.name)
        if body.stream:
            return typed_events(state, streams=streams, writer=writer)
        return await respond(state, request, streams=streams, writer=writer, stream=False)

    @router.post("/v1/messages/count_tokens", **takes(CountTokensBody, *GENERATION))
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensBody, admission=state.admission)
        check_model(state, body.model)
        with refusals_translated(CHAT_NAMES):
            ids = await chat_ids(state, chat_from(chat_fields(body)), request=request)
        return json_answer({"input_tokens": len(ids)})

    return router
