"""`/inference/v1/generate`: token ids in, token ids out, in vLLM's dialect."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests import GenerationRequest
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates
from rayserve_moe.serving.responses.answering import respond, rollout_type
from rayserve_moe.serving.responses.request_streams import open_streams
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.responses.tokens import TokenWriter
from rayserve_moe.serving.routes.request_parts import (
    check_model,
    check_start,
    forced_routing_of,
    num_new_tokens,
    prompt_ids_of,
)
from rayserve_moe.serving.schemas.tokens import TokenBody

_PARAM_NAMES = {
    "prompt": "token_ids",
    "max_tokens": "sampling_params.max_tokens",
    "min_tokens": "sampling_params.min_tokens",
    "logit_bias": "sampling_params.logit_bias",
    "rid": "request_id",
}
_START = "sampling_params.routed_experts_prompt_start"
_MOST_INT16_EXPERTS = 2**15
_DEFAULT_NEW_TOKENS = 16


def token_router(state: ApiState) -> APIRouter:
    """Return the route over one engine."""
    router = APIRouter()

    @router.post("/inference/v1/generate", **generates(TokenBody, in_containers=True))
    async def generate(request: Request) -> Response:
        body = await read_body(request, TokenBody, admission=state.admission)
        check_model(state, body.model)
        container = rollout_type(request, stream=body.stream)
        streams = await open_streams(state, [await _request(state, body, request)], param_names=_PARAM_NAMES)
        routing = _routing_writer(state, body, streams.request_of_choice, in_container=container is not None)
        writer = TokenWriter(state.card, body, request_of_choice=streams.request_of_choice, routing=routing)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream, container=container)

    return router


async def _request(state: ApiState, body: TokenBody, http_request: Request) -> GenerationRequest:
    """Return the engine's request. Routing is wanted unless it is switched off, or the server captures none."""
    params = body.sampling_params
    prompts = await prompt_ids_of(state, [body.token_ids], param="token_ids", request=http_request)
    check_start(params.routed_experts_prompt_start, prompts, param=_START)
    if body.routed_experts_dtype and state.card.routing.num_experts > _MOST_INT16_EXPERTS:
        raise ApiError(400, "`routed_experts_dtype` cannot hold the expert ids", param="routed_experts_dtype")
    (forced,) = await forced_routing_of(state, body.forced_routed_experts, prompts=prompts, is_batch=False)
    limit = num_new_tokens(state, params.max_tokens, default=_DEFAULT_NEW_TOKENS, prompt_len=len(prompts[0]))
    switch = body.return_routed_experts
    return GenerationRequest(
        request_id=body.request_id or uuid.uuid4().hex,
        prompt_ids=prompts[0],
        sampling=params.sampling(limit, params.seed, **params.ends),
        return_routed_experts=(state.card.returns_routing or body.stream_routed_experts) if switch is None else switch,
        cache_salt=body.cache_salt,
        incremental=body.stream or bool(params.stop),
        num_top_logprobs=_num_top_logprobs(body),
        score_prompt_from=None if params.prompt_logprobs is None else 0,
        forced_routing=forced,
        stream_routed_experts=body.stream_routed_experts,
        routed_experts_start=params.routed_experts_prompt_start,
    )


def _num_top_logprobs(body: TokenBody) -> int:
    """The engine tells as many of the likeliest for the prompt as for the output."""
    output, prompt = body.sampling_params.logprobs or 0, body.sampling_params.prompt_logprobs or 0
    return max(output if output > 1 else 0, prompt)


def _routing_writer(
    state: ApiState, body: TokenBody, request_of_choice: Sequence[GenerationRequest], *, in_container: bool
) -> RoutingWriter:
    dialect = "binary" if in_container else body.routed_experts_format
    if dialect == "packed" and body.routed_experts_dtype:
        dialect = f"packed-{body.routed_experts_dtype}"
    return RoutingWriter(
        state.card.routing,
        dialect,
        shares_prompt_rows=dialect in ("binary", "nested"),
        request_of_choice=request_of_choice,
    )
