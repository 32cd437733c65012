"""`/inference/v1/generate`: token ids in, token ids out, in vLLM's dialect. SkyRL has its own name for the route."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests.builder import build_request, param_names
from rayserve_moe.requests.constraint_fields import ConstraintFields
from rayserve_moe.requests.fields import VLLM
from rayserve_moe.requests.records import ROW_START, GenerationRequest, SamplingParams
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates
from rayserve_moe.serving.responses.answering import respond, rollout_type
from rayserve_moe.serving.responses.request_streams import open_streams, refusals_named
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.responses.tokens import TokenWriter
from rayserve_moe.serving.routes.request_parts import check_model, checked_truncation, forced_routing_of, prompt_ids_of
from rayserve_moe.serving.schemas.tokens import IN_SAMPLING, START, TokenBody

_PARAM_NAMES = {
    **param_names(VLLM, SamplingParams, prefix="sampling_params."),
    **param_names(VLLM, ConstraintFields, prefix="sampling_params."),
    **{name: f"sampling_params.{name}" for name in IN_SAMPLING},
    "listed_in_prompt": "sampling_params.prompt_logprob_token_ids",
    "prompt": "token_ids",
    "rid": "request_id",
    ROW_START: f"sampling_params.{START}",
}
_MOST_UINT8_EXPERTS, _MOST_INT16_EXPERTS = 2**8, 2**15
_SKYRL = "/skyrl/v1/generate"
"""SkyRL reads uint8 and int16, never uint16."""


def token_router(state: ApiState) -> APIRouter:
    """Return the route over one engine."""
    router = APIRouter()

    @router.post(_SKYRL, **generates(TokenBody, in_containers=True))
    @router.post("/inference/v1/generate", **generates(TokenBody, in_containers=True))
    async def generate(request: Request) -> Response:
        body = await read_body(request, TokenBody, admission=state.admission)
        check_model(state, body.model)
        container = rollout_type(request, stream=body.stream)
        streams = await open_streams(state, [await _request(state, body, request)], param_names=_PARAM_NAMES)
        dtype = body.routed_experts_dtype
        if request.url.path.endswith(_SKYRL) and state.card.routing.num_experts > _MOST_UINT8_EXPERTS:
            dtype = "int16"
        routing = _routing_writer(state, body, streams.request_of_choice, dtype=dtype, in_container=bool(container))
        writer = TokenWriter(state.card, body, request_of_choice=streams.request_of_choice, routing=routing)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream, container=container)

    return router


async def _request(state: ApiState, body: TokenBody, http_request: Request) -> GenerationRequest:
    """Return the engine's request. Routing is wanted unless it is switched off, or the server captures none."""
    num_tokens, keeps = body.sampling_params.truncate_prompt_tokens, max(1, state.card.max_model_len - 1)
    truncation = checked_truncation(state, num_tokens, side="left", keeps=keeps)
    prompts = await prompt_ids_of(
        state, [body.token_ids], param="token_ids", request=http_request, truncation=truncation
    )
    if body.routed_experts_dtype and state.card.routing.num_experts > _MOST_INT16_EXPERTS:
        raise ApiError(400, "`routed_experts_dtype` cannot hold the expert ids", param="routed_experts_dtype")
    (rows,) = await forced_routing_of(state, body.forced_routed_experts, prompts=prompts, is_batch=False)
    with refusals_named(_PARAM_NAMES):
        return build_request(
            prompts[0], body.given(), dialect=VLLM, card=state.card, request_id=body.request_id, forced=rows
        )


def _routing_writer(
    state: ApiState,
    body: TokenBody,
    request_of_choice: Sequence[GenerationRequest],
    *,
    dtype: str | None,
    in_container: bool,
) -> RoutingWriter:
    dialect = "binary" if in_container else body.routed_experts_format
    if dialect == "packed" and dtype:
        dialect = f"packed-{dtype}"
    return RoutingWriter(
        state.card.routing,
        dialect,
        shares_prompt_rows=dialect in ("binary", "nested"),
        request_of_choice=request_of_choice,
    )
