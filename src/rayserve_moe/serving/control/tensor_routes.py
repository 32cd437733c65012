"""Weights sent in request bodies: safetensors, bucket by bucket, and never unpickled."""

from __future__ import annotations

import asyncio
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
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.commands import outcome_answer
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import validate
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer
from rayserve_moe.serving.schemas.control import BucketOptions

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
                outcome = await Fleet(state).stage_bucket(bucket, sent=body, order=_order_of(options))
            except UpdateConflictError as error:
                raise ApiError(409, str(error), code="weights_conflict") from error
        return outcome_answer(outcome)

    @router.delete(_TENSOR_PATH, **answers(400, 503), openapi_extra=_described("update_id"))
    async def drop_update(request: Request) -> Response:
        was_open = any(await Fleet(state).every("drop_update", _options_of(request).update_id))
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
