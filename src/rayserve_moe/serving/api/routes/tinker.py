"""Routes of Tinker's sampling clients: samples of the served model, fetched after they were ordered.

A session is only a name, so it outlives the server; an order lives in the replica that took it, and its client orders
anew once no replica knows it. Rows of a sample are at a route of their own, which Tinker does not have.
"""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE
from rayserve_moe.requests.builder import build_request, param_names
from rayserve_moe.requests.fields import SGLANG
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.accepted_types import accepted_types
from rayserve_moe.serving.api.answers.request_streams import open_streams, refusals_named
from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.api.answers.tinker_orders import PROTOBUF, Held, Sampled
from rayserve_moe.serving.api.routes.request_parts import adapter_for, prompt_ids_of
from rayserve_moe.serving.api.schemas.tinker import (
    TinkerFutureBody,
    TinkerSampleBody,
    TinkerSamplingSessionBody,
    TinkerSessionBody,
    sampler_name,
    saved_path_in,
)
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.control.saved_weights import SavedWeights
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.ignored_fields import ignored_in
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import GENERATION, answers, named_in_path, takes

PREFIX = "/api/v1"
HOLD_S, HELD_CALL_S = 30.0, 40.0
"""Time for which a question waits for its answer, below the client's timeout of 45 s, and its limit in the fleet."""
_REFRESH_S = 300
_PARAM_NAMES = {
    **param_names(SGLANG, SamplingParams, prefix="sampling_params."),
    **param_names(SGLANG, GenerationRequest),
    "prompt": "prompt.chunks",
    "max_tokens": "sampling_params.max_tokens",
    "n": "num_samples",
}
_Body = TypeVar("_Body", bound=BaseModel)


def tinker_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router, saved = APIRouter(prefix=PREFIX), SavedWeights(state)
    for routes in (_client_routes(state), _session_routes(state, saved), _order_routes(state, saved)):
        router.include_router(routes)
    return router


def _client_routes(state: ApiState) -> APIRouter:
    """Return the routes that a client asks once."""
    router = APIRouter()

    @router.post("/client/config", **answers())
    async def config() -> Response:
        return json_answer({"pjwt_auth_enabled": False})

    @router.post("/client/dynamic_config", **answers())
    async def dynamic_config() -> Response:
        return json_answer({"refresh_interval_sec": _REFRESH_S, "sample_cancel_enabled": True})

    @router.get("/healthz", **answers())
    async def healthz() -> Response:
        return json_answer({"status": "ok"})

    @router.get("/get_server_capabilities", **answers())
    async def capabilities() -> Response:
        card = state.card
        sizes = {"max_context_length": card.max_model_len, "trainable": False, "sampleable": True}
        return json_answer({"supported_models": [{"model_name": card.name, **sizes}]})

    @router.post("/telemetry", **answers())
    async def telemetry() -> Response:
        return json_answer({"status": "accepted"})

    return router


def _session_routes(state: ApiState, saved: SavedWeights) -> APIRouter:
    """Return the routes of names: nothing is kept of a session or a sampler."""
    router = APIRouter()

    @router.post("/create_session", **takes(TinkerSessionBody, 400, 413))
    async def create_session(request: Request) -> Response:
        await _read(state, request, TinkerSessionBody)
        return json_answer({"type": "create_session", "session_id": str(uuid.uuid4())})

    @router.post("/session_heartbeat", **answers())
    async def heartbeat() -> Response:
        return json_answer({"type": "session_heartbeat"})

    @router.post("/sessions/{session_id}/finish", **answers(), openapi_extra=named_in_path("session_id"))
    async def finish() -> Response:
        return json_answer({})

    @router.post("/create_sampling_session", **takes(TinkerSamplingSessionBody, 400, 404, 409, 413, 503))
    async def create_sampling_session(request: Request) -> Response:
        body = await _read(state, request, TinkerSamplingSessionBody)
        if adapter_for(state, body.base_model) not in ("", state.card.name, state.loop.control.adapter):
            raise ApiError(404, "`base_model` is an adapter: name it by `model_path`", param="base_model")
        if body.model_path is not None:
            await saved.load(body.model_path)
        return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler_name(body)})

    @router.get("/samplers/{sampler_id}", **answers(404), openapi_extra=named_in_path("sampler_id"))
    async def sampler(request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        found = {"base_model": state.card.name, "model_path": _saved_path(sampler_id)}
        return json_answer({"sampler_id": sampler_id, **found})

    return router


def _order_routes(state: ApiState, saved: SavedWeights) -> APIRouter:
    """Return the routes of samples."""
    router = APIRouter()

    @router.post("/asample", **takes(TinkerSampleBody, *GENERATION))
    async def asample(request: Request) -> Response:
        await state.refuse_requests(request)
        body = await _read(state, request, TinkerSampleBody)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        async with state.futures.lock_of(request_id):
            if not any((await Fleet(state).call("knows_future", request_id)).values_by_replica.values()):
                state.loop.capacity.check()
                if (path := _saved_path(body.sampling_session_id)) is not None:
                    await saved.keep(path)
                await _order(state, request, body, request_id=request_id, adapter=path or "")
        sequences = [f"{request_id}:{number}" for number in range(body.num_samples)]
        return json_answer({"request_id": request_id, "sample_sequence_ids": sequences})

    @router.post(
        "/retrieve_future", **takes(TinkerFutureBody, 400, 410, 413, 503, kinds=("application/json", PROTOBUF))
    )
    async def retrieve_future(request: Request) -> Response:
        body = await _read(state, request, TinkerFutureBody)
        in_protobuf = PROTOBUF in accepted_types(request)
        asked = (body.request_id, in_protobuf, HOLD_S)
        held = _of_any(await Fleet(state).call("tinker_future", *asked, timeout_s=HELD_CALL_S))
        if held is None:
            raise ApiError(410, "no replica knows this request: order it again", code="unknown_future")
        if held.content is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return json_answer({**waiting, "queue_state_reason": None})
        return Response(held.content, held.status, media_type=held.media_type)

    @router.post("/cancel_future", **takes(TinkerFutureBody, 400, 413, 503))
    async def cancel_future(request: Request) -> Response:
        body = await _read(state, request, TinkerFutureBody)
        await Fleet(state).call("drop_future", body.request_id)
        return json_answer({})

    described = answers(404, 503, kinds=(ROLLOUT_MEDIA_TYPE,))

    @router.get("/rollout_evidence/{sequence_id}", **described, openapi_extra=named_in_path("sequence_id"))
    async def evidence(request: Request) -> Response:
        held = _of_any(await Fleet(state).call("tinker_evidence", request.path_params["sequence_id"]))
        if held is None or held.content is None:
            raise ApiError(404, "no replica has a finished sample of this id", code="unknown_sequence")
        return Response(held.content, held.status, media_type=held.media_type)

    return router


async def _read(state: ApiState, request: Request, schema: type[_Body]) -> _Body:
    """Read a body.

    Raises: ApiError 400 for an unknown field, because Tinker's clients take an ignored one for a fault of the server.
    """
    body = await read_body(request, schema, admission=state.admission)
    if names := ignored_in(request):
        raise ApiError(400, f"{len(names)} fields of the body are not known here", code="unknown_field")
    return body


def _saved_path(sampler: str) -> str | None:
    """Return the path of a sampler's saved weights, if any. Raises ApiError 404 for the id of no sampler."""
    try:
        return saved_path_in(sampler)
    except ValueError as error:
        raise ApiError(404, "no such sampler", param="sampling_session_id", code="unknown_sampler") from error


async def _order(
    state: ApiState, http_request: Request, body: TinkerSampleBody, *, request_id: str, adapter: str
) -> None:
    """Submit the request, and keep its outcome under its id. Raises ApiError if it cannot be served."""
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise ApiError(
            400, "`prompt.chunks` should be of type encoded_text: images are not read", param="prompt.chunks"
        )
    joined = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    (prompt_ids,) = await prompt_ids_of(state, [joined], param="prompt.chunks", request=http_request)
    with refusals_named(_PARAM_NAMES):
        given = _given(body, num_left=max(1, state.card.max_model_len - len(prompt_ids))) | {"lora_path": adapter}
        asked = build_request(prompt_ids, given, dialect=SGLANG, card=state.card, request_id=request_id)
    streams = await open_streams(state, [asked], param_names=_PARAM_NAMES, scope=http_request.scope)

    async def sampled() -> Sampled:
        try:
            results = await streams.results()
        finally:
            streams.close()
        return Sampled(body, asked, results, max(streams.elapsed_s))

    state.futures.start(request_id, sampled(), size_of=lambda outcome: outcome.num_bytes)


def _given(body: TinkerSampleBody, *, num_left: int) -> dict[str, Any]:
    """Return the request's fields in SGLang's names."""
    sampling, num_top = body.sampling_params, max(body.topk_prompt_logprobs, body.topk_sample_logprobs)
    stop = sampling.stop or []
    is_scored = body.prompt_logprobs or body.topk_prompt_logprobs
    named = {"stop": stop} if stop and isinstance(stop[0], str) else {"stop_token_ids": stop}
    seed = {} if sampling.seed is None else {"sampling_seed": np.uint32(sampling.seed & 0xFFFFFFFF).item()}
    return {
        "max_new_tokens": num_left if sampling.max_tokens is None else sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": max(0, sampling.top_k),
        "top_p": sampling.top_p,
        "n": body.num_samples,
        "ignore_eos": sampling.stop is not None and not stop,
        "no_stop_trim": True,
        "return_logprob": True,
        "logprob_start_len": 0 if is_scored else -1,
        "top_logprobs_num": num_top,
        **{name: tuple(values) for name, values in named.items() if values},
        **seed,
    }


def _of_any(answered: Any) -> Held | None:
    """Return what any replica has: an answer before an order that runs."""
    known: list[Held] = [held for held in answered.values_by_replica.values() if held is not None]
    return next((held for held in known if held.content is not None), next(iter(known), None))
