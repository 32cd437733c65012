"""Control under the names of vLLM, Miles and AReaL, and weights sent in request bodies.

SGLang's names are in `control`. Weights arrive as safetensors, bucket by bucket, and are never unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.checkpoints.bucket import SentBucket, read_bucket
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.config.given_files import one_line
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder, TensorUpdates, UpdateConflictError
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.routes.unsupported import BY_COLLECTIVE
from rayserve_moe.serving.api.schemas.control import (
    AbortIdsBody,
    BucketOptions,
    PauseOptions,
    UpdateWeightsBody,
    WeightDirBody,
    WeightNameBody,
)
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet_buckets import stage_everywhere
from rayserve_moe.serving.control.fleet_control import ask_every, pause_all, rename_all
from rayserve_moe.serving.control.routes import check_admin, outcome_answer, update_answer
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body, read_options, validate
from rayserve_moe.serving.openapi import COMMAND, answers, takes

_AT_ONCE = "weights change between two steps, once all of them are there: nothing is to be begun or ended"
_MODES = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
_POLL_S = 0.02
_TENSOR_PATH = "/update_weights_from_tensor"
_PICKLED = (
    "weights arrive as safetensors: application/vnd.safetensors, one bucket of tensors under the checkpoint's names; "
    "nothing from the network is unpickled"
)
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_OPTION_KINDS = {
    "update_id": "string",
    "bucket": "integer",
    "last": "boolean",
    "weight_version": "string",
    "flush_cache": "boolean",
    "abort_all_requests": "boolean",
}


def trainer_control_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()
    _add_pauses(router, state)
    _add_weight_routes(router, state)

    @router.post("/inference/v1/abort_requests", **takes(AbortIdsBody, *COMMAND))
    @router.post("/abort_requests", **takes(AbortIdsBody, *COMMAND))
    async def abort_requests(request: Request) -> Response:
        body = await read_options(request, AbortIdsBody, admission=state.admission)
        state.loop.check_health()
        num_aborted = len(body.request_ids)
        for request_id in body.request_ids:
            await ask_every(state, "abort", request_id, False)
        if not body.request_ids:
            check_admin(state, request)
            num_aborted = sum(await ask_every(state, "abort_all"))
        return json_answer({"status": "aborted", "aborted": num_aborted})

    return router


def _add_pauses(router: APIRouter, state: ApiState) -> None:
    @router.post("/pause", **takes(PauseOptions, *COMMAND))
    async def pause(request: Request) -> Response:
        options = await read_options(request, PauseOptions, admission=state.admission)
        if options.wait_for_inflight_requests and options.mode == "abort":
            options.mode = "wait"
        if options.mode == "wait" and not state.loop.control.is_paused:
            await while_connected(request.receive, _until_all_ended(state))
        await pause_all(state, _MODES[options.mode])
        if options.mode != "keep" and options.clear_cache:
            await ask_every(state, "flush", False)
        return json_answer({"status": "paused"})

    @router.post("/resume", **answers(413, 503))
    async def resume() -> Response:
        await pause_all(state, None)
        return json_answer({"status": "resumed"})

    @router.get("/is_paused", **answers())
    async def is_paused() -> Response:
        return json_answer({"is_paused": state.loop.control.is_paused})

    @router.get("/is_sleeping", **answers())
    async def is_sleeping() -> Response:
        return json_answer({"is_sleeping": False})

    @router.post("/areal_pause_generation", **answers(413, 503))
    async def areal_pause_generation() -> Response:
        await pause_all(state, "abort")
        return json_answer({"success": True, "message": "generation is paused"})

    @router.post("/areal_continue_generation", **answers(413, 503))
    async def areal_continue_generation() -> Response:
        await pause_all(state, None)
        return json_answer({"success": True, "message": "generation goes on"})


async def _until_all_ended(state: ApiState) -> None:
    """Hold new requests and wait until all current requests have ended; undone if it is cancelled."""
    await ask_every(state, "hold_new", True)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(_end_hold, state)
        while any(await ask_every(state, "num_unended")):  # noqa: ASYNC110 (state of other replicas)
            await asyncio.sleep(_POLL_S)
        undo.pop_all()


async def _end_hold(state: ApiState) -> None:
    with contextlib.suppress(ApiError):
        await ask_every(state, "hold_new", False)


def _add_weight_routes(router: APIRouter, state: ApiState) -> None:
    @router.post("/update_weights", **takes(WeightDirBody, 501, *COMMAND))
    async def update_weights(request: Request) -> Response:
        body = await read_body(request, WeightDirBody, admission=state.admission)
        if body.weight_dir is None:
            raise ApiError(501, f"{BY_COLLECTIVE}, or to this route as `weight_dir`", code="not_implemented")
        return await update_answer(state, WeightOrder(body.weight_dir), param="weight_dir")

    @router.post("/areal_update_weights", **takes(UpdateWeightsBody, *COMMAND))
    async def areal_update_weights(request: Request) -> Response:
        body = await read_body(request, UpdateWeightsBody, admission=state.admission)
        order = WeightOrder(body.model_path, body.weight_version or None, aborts_requests=body.abort_all_requests)
        return await update_answer(state, order)

    @router.post("/update_weight_version", **takes(WeightNameBody, *COMMAND))
    async def update_weight_version(request: Request) -> Response:
        body = await read_options(request, WeightNameBody, admission=state.admission)
        await rename_all(state, body.new_version, aborts_requests=body.abort_all_requests)
        return json_answer({"success": True, "message": "the weights are renamed", "new_version": body.new_version})

    @router.post("/end_weight_update", **answers(413))
    @router.post("/begin_weight_update", **answers(413))
    async def bracket_weight_update() -> Response:
        return json_answer({"success": True, "message": _AT_ONCE})


def tensor_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()
    receiving = asyncio.Lock()  # at most a single bucket in memory

    @router.post(_TENSOR_PATH, **answers(400, 408, 409, 413, 503), openapi_extra=_described(*_OPTION_KINDS))
    async def update_weights_from_tensor(request: Request) -> Response:
        await _refuse_json(request)
        options = _options_of(request)
        state.loop.check_health()
        async with receiving:
            body = bytearray()
            bucket = await _bucket_of(request, state, options.update_id, body=body)
            if isinstance(bucket, str):
                return outcome_answer(WeightOutcome(False, bucket, state.card.weight_version))
            try:
                outcome = await stage_everywhere(state, bucket, sent=body, order=_order_of(options))
            except UpdateConflictError as error:
                raise ApiError(409, str(error), code="weights_conflict") from error
        return outcome_answer(outcome)

    @router.delete(_TENSOR_PATH, **answers(400, 503), openapi_extra=_described("update_id"))
    async def drop_update(request: Request) -> Response:
        was_open = any(await ask_every(state, "drop_update", _options_of(request).update_id))
        return json_answer({"success": True, "was_open": was_open})

    return router


def _described(*names: str) -> dict[str, Any]:
    """Return the OpenAPI description of query parameters."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name == "update_id", "schema": {"type": _OPTION_KINDS[name]}}
            for name in names
        ]
    }


def _tensors(state: ApiState) -> TensorUpdates:
    return state.loop.control.tensors


async def _refuse_json(request: Request) -> None:
    """Raise ApiError 400 for SGLang's form, whose tensors are pickled.

    The body is read to its end, because the client still writes.
    """
    if "json" in request.headers.get("content-type", ""):
        async for _ in request.stream():
            pass
        raise ApiError(400, _PICKLED, code="weights_refused")


def _options_of(request: Request) -> BucketOptions:
    """Read and validate the query.

    Raises: ApiError 400 that names the wrong parameter.
    """
    fields: dict[str, Any] = {name: value for name, value in request.query_params.items() if name in _OPTION_KINDS}
    for name, value in fields.items():
        if _OPTION_KINDS[name] == "boolean":
            fields[name] = _FLAGS.get(value.lower(), value)
        elif name == "bucket" and value.isdecimal():
            fields[name] = int(value[:9])
    return validate(BucketOptions, fields)


def _order_of(options: BucketOptions) -> BucketOrder:
    order = WeightOrder("", options.weight_version or None, aborts_requests=options.abort_all_requests)
    return BucketOrder(options.update_id, order, options.bucket, options.last)


async def _bucket_of(request: Request, state: ApiState, update_id: str, *, body: bytearray) -> SentBucket | str:
    """Receive a bucket into `body`; return it, or the reason for its refusal.

    The update is dropped if the bucket is unusable or the client disconnects; other replicas then reject later buckets.
    """
    with ExitStack() as ending:
        ending.callback(_tensors(state).drop, update_id)
        async for part in request.stream():
            body += part
        try:
            bucket = await asyncio.to_thread(read_bucket, body)
        except CheckpointError as error:
            return one_line(str(error))
        ending.pop_all()
    return bucket
