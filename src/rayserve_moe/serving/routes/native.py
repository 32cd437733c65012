"""`/generate`: the native route in SGLang's dialect.

A stream sends, per event, the whole answer of a choice so far: text and ids grow from event to event.
"""

from __future__ import annotations

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.answers import first_scored
from rayserve_moe.requests import GenerationRequest, SamplingParams
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates
from rayserve_moe.serving.responses.answering import respond, rollout_type
from rayserve_moe.serving.responses.native import NativeWriter
from rayserve_moe.serving.responses.request_streams import open_streams
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.routes.request_parts import check_start, forced_routing_of, num_new_tokens, prompt_ids_of
from rayserve_moe.serving.schemas.native import GenerateBody, NativeSampling

_DEFAULT_NEW_TOKENS = 128


def native_router(state: ApiState) -> APIRouter:
    """Return the route over one engine."""
    router = APIRouter()

    @router.post("/generate", **generates(GenerateBody, in_containers=True))
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateBody, admission=state.admission)
        container = rollout_type(request, stream=body.stream)
        streams = await open_streams(state, await _requests(state, body, request), param_names=_param_names(body))
        routing = RoutingWriter(
            state.card.routing,
            "binary" if container else body.routed_experts_format,
            shares_prompt_rows=container is not None,
            request_of_choice=streams.request_of_choice,
        )
        writer = NativeWriter(state.card, body, streams=streams, routing=routing)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream, container=container)

    return router


def _param_names(body: GenerateBody) -> dict[str, str]:
    names = {"top_logprobs": "top_logprobs_num", "logit_bias": "sampling_params.logit_bias"}
    prompt = "input_ids" if body.text is None else "text"
    limits = {"max_tokens": "sampling_params.max_new_tokens", "min_tokens": "sampling_params.min_new_tokens"}
    return {"prompt": prompt, **limits, **names}


async def _requests(state: ApiState, body: GenerateBody, http_request: Request) -> list[GenerationRequest]:
    param = _param_names(body)["prompt"]
    prompts = await prompt_ids_of(state, body.batch.prompts, param=param, request=http_request)
    check_start(body.routed_experts_start_len, prompts, param="routed_experts_start_len")
    forced = await forced_routing_of(state, body.forced_routed_experts, prompts=prompts, is_batch=body.batch.is_batch)
    sampling = body.sampling_params if len(body.sampling_params) > 1 else body.sampling_params * len(prompts)
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=_sampling(state, params, len(prompt_ids)),
            return_routed_experts=body.wants_routing,
            cache_salt=body.cache_salt,
            incremental=body.stream or bool(params.stop),
            num_top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
            score_prompt_from=first_scored(body.logprob_start_len, len(prompt_ids)) if body.return_logprob else None,
            forced_routing=rows,
            stream_routed_experts=body.stream_routed_experts,
            routed_experts_start=body.routed_experts_start_len,
        )
        for request_id, prompt_ids, params, rows in zip(_request_ids(body), prompts, sampling, forced, strict=True)
    ]


def _sampling(state: ApiState, params: NativeSampling, prompt_len: int) -> SamplingParams:
    limit = num_new_tokens(state, params.max_new_tokens, default=_DEFAULT_NEW_TOKENS, prompt_len=prompt_len)
    return params.sampling(limit, params.sampling_seed, **params.ends)


def _request_ids(body: GenerateBody) -> list[str]:
    if isinstance(body.rid, list):
        return body.rid
    stem = body.rid or uuid.uuid4().hex
    return [f"{stem}_{position}" for position in range(len(body.batch.prompts))] if body.batch.is_batch else [stem]
