"""`/v1/responses`: OpenAI's newer dialect, over the chats of this server. Responses are kept in bounded memory, by the
replica that answered them; whichever is asked finds them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.fleet_control import READ_S, ask_all, ask_every, values_of
from rayserve_moe.serving.middleware.json_body import chat_from, read_body, refusals_translated
from rayserve_moe.serving.openapi import answers, generates
from rayserve_moe.serving.response_store import StoredResponse
from rayserve_moe.serving.responses.answering import respond, typed_events
from rayserve_moe.serving.responses.responses import ResponsesWriter
from rayserve_moe.serving.responses.streaming import json_answer
from rayserve_moe.serving.routes.chat_prompt import chat_ids
from rayserve_moe.serving.routes.openai import opened
from rayserve_moe.serving.routes.request_parts import check_model
from rayserve_moe.serving.schemas.responses import CHAT_NAMES, ResponsesBody, chat_fields, messages_of

_ID = {"parameters": [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]}


def responses_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()

    @router.post("/v1/responses", **generates(ResponsesBody))
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, admission=state.admission)
        check_model(state, body.model)
        before = body.previous_response_id
        earlier = () if before is None else (await _stored(state, before, param="previous_response_id")).messages
        messages = [*earlier, *messages_of(body.input)]
        with refusals_translated(CHAT_NAMES):
            chat = chat_from(chat_fields(body, messages))
            prompt_ids = await chat_ids(state, chat, request=request)
            streams, inner = await opened(state, chat, prompts=[prompt_ids])

        def keep(answer: dict[str, Any]) -> None:
            state.responses.put(answer, [*messages, *messages_of(answer["output"] or "")])

        (choice,) = streams.request_of_choice
        writer = ResponsesWriter(inner, choice, body=body, model=state.card.name, keep=keep)
        if body.stream:
            return typed_events(state, streams=streams, writer=writer)
        return await respond(state, request, streams=streams, writer=writer, stream=False)

    @router.get("/v1/responses/{response_id}", **answers(404), openapi_extra=_ID)
    async def response(request: Request) -> Response:
        return json_answer((await _stored(state, request.path_params["response_id"], param="response_id")).answer)

    @router.delete("/v1/responses/{response_id}", **answers(404), openapi_extra=_ID)
    async def forget(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if not any(await ask_every(state, "forget_response", response_id, timeout_s=READ_S)):
            raise _unknown("response_id")
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    return router


async def _stored(state: ApiState, response_id: str, *, param: str) -> StoredResponse:
    """Find a response here, else at any replica. ApiError 404 for one that was not stored, or had to make way for
    others; 503 where a replica that may have it does not answer."""
    if (found := state.responses.get(response_id)) is not None:
        return found
    answers = await ask_all(state, "stored_response", response_id)
    if (found := next((one for one in answers.values if one is not None), None)) is not None:
        return found
    values_of(answers)
    raise _unknown(param)


def _unknown(param: str) -> ApiError:
    message = "no such response is stored: it may have made way for later ones"
    return ApiError(404, message, param=param, code="response_not_found")
