"""Routes `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from rayserve_moe.requests.builder import build_request
from rayserve_moe.requests.fields import OPENAI
from rayserve_moe.requests.records import Constraint, GenerationRequest, RequestError
from rayserve_moe.serving.api.answers.answering import respond
from rayserve_moe.serving.api.answers.chat_parts import asked_parts
from rayserve_moe.serving.api.answers.openai import OpenAIWriter
from rayserve_moe.serving.api.answers.request_streams import RequestStreams, open_streams, refusals_named
from rayserve_moe.serving.api.routes.chat_prompt import chat_ids
from rayserve_moe.serving.api.routes.request_parts import (
    adapter_for,
    forced_rows_of,
    prompt_ids_of,
    truncation_of,
)
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.journalling import answer_stem, asking_of
from rayserve_moe.serving.middleware.json_body import chat_from, read_body, refusals_translated
from rayserve_moe.serving.openapi import generates
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar, content_grammar
from rayserve_moe.text.tool_calls.parameter_schemas import UnwritableSchemaError
from rayserve_moe.text.tool_calls.registry import HARMONY, RESPONSE_TEMPLATE

Body = TypeVar("Body", CompletionBody, ChatBody)
_CHAT_NAMES = {"prompt": "messages"}
_COMPLETION_NAMES = {"top_logprobs": "logprobs"}
_CHOICE = "tool_choice"


def openai_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.post("/v1/completions", **generates(CompletionBody))
    async def completions(request: Request) -> Response:
        body = with_routing(state, await read_body(request, CompletionBody, admission=state.admission))
        adapter_for(state, body.model, name=body.lora_path)
        prompts = await prompt_ids_of(
            state,
            body.prompt,
            param="prompt",
            request=request,
            add_special_tokens=body.add_special_tokens,
            truncation=truncation_of(state, body),
        )
        return await _answer(state, request, body=body, prompts=prompts)

    @router.post("/v1/chat/completions", **generates(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = with_routing(state, await read_body(request, ChatBody, admission=state.admission))
        adapter_for(state, body.model, name=body.lora_path)
        prompt_ids = await chat_ids(state, body, request=request)
        return await _answer(state, request, body=body, prompts=[prompt_ids])

    return router


def with_routing(state: ApiState, body: Body) -> Body:
    """Return the body, with routing requested if it does not mention routing and the server returns it by default."""
    kind, given = state.card.routing_by_default, body.model_fields_set
    if kind == "off" or "return_routed_experts" in given:
        return body
    asked = {"return_routed_experts": True, "routed_experts_format": kind}
    return body.model_copy(update={name: value for name, value in asked.items() if name not in given})


async def _answer(
    state: ApiState, http_request: Request, *, body: CompletionBody | ChatBody, prompts: Sequence[np.ndarray]
) -> Response:
    streams, writer = await opened(state, body, prompts=prompts, scope=http_request.scope)
    return await respond(state, http_request, streams=streams, writer=writer, stream=body.stream)


async def opened(
    state: ApiState, body: CompletionBody | ChatBody, *, prompts: Sequence[np.ndarray], scope: Scope
) -> tuple[RequestStreams, OpenAIWriter]:
    """Submit the requests of a body; return their streams and the writer of the answer."""
    prefix, names = ("chatcmpl", _CHAT_NAMES) if isinstance(body, ChatBody) else ("cmpl", _COMPLETION_NAMES)
    answer_id = body.rid or f"{prefix}-{answer_stem(asking_of(scope))}"
    with refusals_named(names):
        requests = await _requests(state, body, answer_id=answer_id, prompts=prompts)
    streams = await open_streams(state, requests, param_names=names, scope=scope)
    return streams, OpenAIWriter(state, body, answer_id=answer_id, streams=streams)


async def opened_chat(
    state: ApiState, request: Request, *, fields: Callable[[], dict[str, Any]], names: Mapping[str, str]
) -> tuple[RequestStreams, OpenAIWriter]:
    """Submit the chat that another dialect's body becomes; `names` are that dialect's names of chat fields."""
    with refusals_translated(names):
        chat = chat_from(fields())
        prompt_ids = await chat_ids(state, chat, request=request)
        return await opened(state, chat, prompts=[prompt_ids], scope=request.scope)


async def _requests(
    state: ApiState, body: CompletionBody | ChatBody, *, answer_id: str, prompts: Sequence[np.ndarray]
) -> list[GenerationRequest]:
    """Return the engine's requests. A chat without a limit may fill the context."""
    given = dict(body) | {"lora_path": adapter_for(state, body.model, name=body.lora_path)}
    if isinstance(body, ChatBody):
        limits = (body.max_completion_tokens, given["max_tokens"], max(1, state.card.max_model_len - len(prompts[0])))
        given |= {"max_tokens": next(limit for limit in limits if limit is not None), "echo": False}
    else:
        given["n"] = body.num_samples
    forced = await forced_rows_of(state, body, prompts=prompts, is_batch=len(prompts) > 1)
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{position}" for position in range(len(prompts))]
    requests = [
        build_request(prompt_ids, given, dialect=OPENAI, card=state.card, request_id=request_id, forced=rows)
        for request_id, prompt_ids, rows in zip(ids, prompts, forced, strict=True)
    ]
    if not isinstance(body, ChatBody):
        return requests
    kept_ids = state.chat_output.kept_ids(**asked_parts(body))
    return [
        replace(
            request, kept_special_ids=kept_ids, constraint=chat_constraint(state.chat_output, body, request=request)
        )
        for request in requests
    ]


def chat_constraint(output: ChatOutput, body: ChatBody, *, request: GenerationRequest) -> Constraint | None:
    """Return the constraint of the engine's request.

    Raises: RequestError for a constraint that this checkpoint's format cannot express.
    """
    constraint = request.constraint
    if body.forced_tools:
        if constraint is not None:
            raise RequestError(f"`{_CHOICE}` is given too: an answer keeps to one constraint", constraint.param)
        return _calls(output, body)._replace(after=output.reasoning_end(request.prompt_ids))
    if constraint is None:
        return None
    if HARMONY in output.format:
        reasoning = FORMS[HARMONY].reasoning
        assert reasoning is not None, "answers in channels may reason"
        return constraint._replace(within=content_grammar(reasoning, special_ids=output.special_ids))
    return constraint._replace(after=output.reasoning_end(request.prompt_ids))


def _calls(output: ChatOutput, body: ChatBody) -> Constraint:
    form = None if RESPONSE_TEMPLATE in output.format else output.call_form()
    if form is None:
        raise RequestError("can be none or auto: how this checkpoint writes calls is not known", _CHOICE)
    functions = [tool["function"] for tool in body.forced_tools]
    allows_several = body.parallel_tool_calls and isinstance(body.tool_choice, str)
    try:
        lark, schemas = call_grammar(form, functions, special_ids=output.special_ids, allows_several=allows_several)
    except UnwritableSchemaError as error:
        raise RequestError(f"the parameters of a tool cannot be used: `{error}` is not supported", _CHOICE) from error
    return Constraint("calls", json.dumps({"lark": lark, "schemas": schemas}, ensure_ascii=False), _CHOICE)
