"""Commands of trainers and operators to all replicas, under the names of SGLang, vLLM, Miles, SkyRL and AReaL.

Weights in request bodies arrive as safetensors, bucket by bucket, and are never unpickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rayserve_moe.checkpoints.bucket import SentAdapter, SentBucket, read_bucket
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.config.given_files import one_line
from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder, TensorUpdates, UpdateConflictError
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.routes.unsupported import BY_COLLECTIVE
from rayserve_moe.serving.api.schemas.control import (
    AbortBody,
    AbortIdsBody,
    BucketOptions,
    LoadAdapterBody,
    PauseBody,
    PauseOptions,
    ResetOptions,
    UnloadAdapterBody,
    UpdateWeightsBody,
    WeightDirBody,
    WeightNameBody,
)
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.adapters import (
    AdapterOutcome,
    holds_beside,
    load_adapter,
    merge_directory,
    names_adapter,
    sent_name,
    take_sent_adapter,
    unload_adapter,
)
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.edge_guard import has_admin_key, refused_key
from rayserve_moe.serving.middleware.json_body import read_body, read_options, validate
from rayserve_moe.serving.openapi import COMMAND, answers, takes

_MODES = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
_POLL_S = 0.02
_AT_ONCE = "weights change between two steps, once all of them are there: nothing is to be begun or ended"


_TENSOR_PATH = "/update_weights_from_tensor"
_PICKLED = (
    "weights arrive as safetensors: application/vnd.safetensors, one bucket of tensors under the checkpoint's names; "
    "nothing from the network is unpickled"
)
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_OPTION_KINDS = {
    "update_id": "string",
    "lora_name": "string",
    "bucket": "integer",
    "last": "boolean",
    "weight_version": "string",
    "flush_cache": "boolean",
    "abort_all_requests": "boolean",
}


@dataclass(frozen=True)
class Asked:
    """A command that has arrived."""

    state: ApiState
    request: Request

    @property
    def fleet(self) -> Fleet:
        """Return the replicas that it concerns."""
        return Fleet(self.state)


@dataclass(frozen=True)
class Command:
    """A row of the table: a call with its validated body, whose value becomes the answer."""

    call: Callable[[Asked, Any], Awaitable[Any]]
    answer: dict[str, Any] | Callable[[Any], Response]
    """Answer to a success: always the same, or made of the call's value."""
    body: type[BaseModel] | None = None
    is_optional: bool = False
    """True if the body may be missing, and its fields may stand in the query."""
    refusals: tuple[int, ...] = COMMAND
    methods: tuple[str, ...] = ("POST",)
    name: str = ""
    """Name in the description; empty for the path's last part."""

    async def respond(self, state: ApiState, request: Request) -> Response:
        """Read the body, call, and answer."""
        read = read_options if self.is_optional else read_body
        body = None if self.body is None else await read(request, self.body, admission=state.admission)
        value = await self.call(Asked(state, request), body)
        return json_answer(self.answer) if isinstance(self.answer, dict) else self.answer(value)


async def _abort(asked: Asked, body: AbortBody) -> None:
    asked.state.loop.check_health()
    if body.abort_all or body.prefix:
        _check_admin(asked)
    await (asked.fleet.every("abort_all") if body.abort_all else asked.fleet.every("abort", body.rid, body.prefix))


async def _abort_ids(asked: Asked, body: AbortIdsBody) -> dict[str, Any]:
    asked.state.loop.check_health()
    num_aborted = len(body.request_ids)
    for request_id in body.request_ids:
        await asked.fleet.every("abort", request_id, False)
    if not body.request_ids:
        _check_admin(asked)
        num_aborted = sum(await asked.fleet.every("abort_all"))
    return {"status": "aborted", "aborted": num_aborted}


async def _flush(asked: Asked, options: ResetOptions) -> None:
    asked.state.loop.check_health()
    if not all(await asked.fleet.every("flush", options.reset_running_requests)):
        raise ApiError(400, "requests are running: wait for them, or abort them first", code="requests_running")


async def _pause(asked: Asked, body: PauseBody | None) -> None:
    await asked.fleet.pause("abort" if body is None else body.mode)


async def _pause_by_options(asked: Asked, options: PauseOptions) -> None:
    if options.wait_for_inflight_requests and options.mode == "abort":
        options.mode = "wait"
    if options.mode == "wait" and not asked.state.loop.control.is_paused:
        await while_connected(asked.request.receive, _until_all_ended(asked.fleet))
    await asked.fleet.pause(_MODES[options.mode])
    if options.mode != "keep" and options.clear_cache:
        await asked.fleet.every("flush", False)


async def _until_all_ended(fleet: Fleet) -> None:
    """Hold new requests and wait until all current requests have ended; undone if it is cancelled."""
    await fleet.every("hold_new", True)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(_end_hold, fleet)
        while any(await fleet.every("num_unended")):  # noqa: ASYNC110 (state of other replicas)
            await asyncio.sleep(_POLL_S)
        undo.pop_all()


async def _end_hold(fleet: Fleet) -> None:
    with suppress(ApiError):
        await fleet.every("hold_new", False)


async def _resume(asked: Asked, _: None) -> None:
    await asked.fleet.pause(None)


async def _update(asked: Asked, body: UpdateWeightsBody) -> WeightOutcome:
    return await _update_by(
        asked, WeightOrder(body.model_path, body.weight_version or None, aborts_requests=body.abort_all_requests)
    )


async def _update_by(asked: Asked, order: WeightOrder) -> WeightOutcome:
    """Load a checkpoint, or the adapter that a directory holds in place of one, under the model's name."""
    if await names_adapter(asked.state, order.model_path):
        return await merge_directory(asked.fleet, order.model_path, order=order, name=asked.state.card.name)
    return await asked.fleet.update_weights(order)


async def _load_adapter(asked: Asked, body: LoadAdapterBody) -> AdapterOutcome:
    return await load_adapter(asked.fleet, body)


async def _unload_adapter(asked: Asked, body: UnloadAdapterBody) -> AdapterOutcome:
    return await unload_adapter(asked.fleet, body)


async def _update_from_dir(asked: Asked, body: WeightDirBody) -> WeightOutcome:
    if body.weight_dir is None:
        raise ApiError(501, f"{BY_COLLECTIVE}, or to this route as `weight_dir`", code="not_implemented")
    return await _update_by(asked, WeightOrder(body.weight_dir))


async def _rename(asked: Asked, body: WeightNameBody) -> dict[str, Any]:
    await asked.fleet.rename_weights(body.new_version, aborts_requests=body.abort_all_requests)
    return {"success": True, "message": "the weights are renamed", "new_version": body.new_version}


async def _is_paused(asked: Asked, _: None) -> dict[str, bool]:
    return {"is_paused": asked.state.loop.control.is_paused}


async def _nothing(_: Asked, __: None) -> None:
    return None


def _check_admin(asked: Asked) -> None:
    """Raise ApiError 401 for a request without the key for changes that affect all clients."""
    if not has_admin_key(asked.state.server, asked.request.headers.get("authorization", "")):
        raise refused_key()


def outcome_answer(outcome: WeightOutcome, *, param: str | None = None, more: dict[str, Any] | None = None) -> Response:
    """Return the answer to an update, with `more` fields on success.

    A refusal has status 400, and an error object beside SGLang's fields.
    """
    fields = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
    if outcome.success:
        measured = {"max_rounding": outcome.max_rounding, "probe_kl": outcome.probe_kl}
        measured = {name: value for name, value in measured.items() if value is not None}
        return json_answer({**fields, "weight_version": outcome.weight_version, **measured, **(more or {})})
    error = ApiError(400, outcome.message, param=param, code="weights_refused")
    return json_answer({**error.body(), **fields}, status=error.status)


def _merged(done: AdapterOutcome) -> Response:
    return outcome_answer(done.outcome, param="lora_path", more={"loaded_adapters": dict(done.loaded)})


def _merged_in_words(done: AdapterOutcome) -> Response:
    """Return vLLM's answer, a sentence; a refusal is the same as on the other routes."""
    if not done.outcome.success:
        return _merged(done)
    change = "added" if done.is_loaded else "removed"
    return PlainTextResponse(f"Success: LoRA adapter '{done.name}' {change} successfully.")


def _updated(param: str) -> Callable[[WeightOutcome], Response]:
    return lambda outcome: outcome_answer(outcome, param=param)


_BARE = (413, 503)
_PAUSED = {"success": True, "message": "generation is paused"}
_GOES_ON = {"success": True, "message": "generation goes on"}
_FLUSHED = {"success": True, "message": "the cache is flushed"}
_ABORT_IDS = Command(_abort_ids, json_answer, AbortIdsBody, is_optional=True)
_FLUSH = Command(_flush, _FLUSHED, ResetOptions, is_optional=True, name="flush_cache")
_UPDATE = Command(_update, _updated("model_path"), UpdateWeightsBody, refusals=(409, *COMMAND))
_MERGING = (404, 409, *COMMAND)
_LOAD = Command(_load_adapter, _merged, LoadAdapterBody, refusals=_MERGING, name="load_lora_adapter")
_UNLOAD = Command(_unload_adapter, _merged, UnloadAdapterBody, refusals=_MERGING, name="unload_lora_adapter")
_BRACKET = Command(_nothing, {"success": True, "message": _AT_ONCE}, refusals=(413,), name="bracket_weight_update")
COMMANDS: dict[str, tuple[Command, ...]] = {
    "/abort_request": (Command(_abort, {"success": True}, AbortBody),),
    "/abort_requests": (_ABORT_IDS,),
    "/inference/v1/abort_requests": (_ABORT_IDS,),
    "/flush_cache": (replace(_FLUSH, methods=("GET",)), _FLUSH),
    "/reset_prefix_cache": (_FLUSH,),
    "/pause_generation": (Command(_pause, {"success": True, "status": "ok", **_PAUSED}, PauseBody),),
    "/continue_generation": (Command(_resume, {"success": True, "status": "ok", **_GOES_ON}, refusals=_BARE),),
    "/areal_pause_generation": (Command(_pause, _PAUSED, refusals=_BARE),),
    "/areal_continue_generation": (Command(_resume, _GOES_ON, refusals=_BARE),),
    "/pause": (Command(_pause_by_options, {"status": "paused"}, PauseOptions, is_optional=True),),
    "/resume": (Command(_resume, {"status": "resumed"}, refusals=_BARE),),
    "/is_paused": (Command(_is_paused, json_answer, refusals=(), methods=("GET",)),),
    "/is_sleeping": (Command(_nothing, {"is_sleeping": False}, refusals=(), methods=("GET",)),),
    "/update_weights_from_disk": (_UPDATE,),
    "/areal_update_weights": (_UPDATE,),
    "/update_weights": (
        Command(_update_from_dir, _updated("weight_dir"), WeightDirBody, refusals=(409, 501, *COMMAND)),
    ),
    "/load_lora_adapter": (_LOAD,),
    "/skyrl/v1/load_lora_adapter": (_LOAD,),
    "/v1/load_lora_adapter": (replace(_LOAD, answer=_merged_in_words),),
    "/unload_lora_adapter": (_UNLOAD,),
    "/v1/unload_lora_adapter": (replace(_UNLOAD, answer=_merged_in_words),),
    "/update_weight_version": (Command(_rename, json_answer, WeightNameBody, is_optional=True),),
    "/begin_weight_update": (_BRACKET,),
    "/end_weight_update": (_BRACKET,),
}
"""Rows by path."""


def command_router(state: ApiState) -> APIRouter:
    """Return a route for each row of the table."""
    router = APIRouter()
    for path, commands in COMMANDS.items():
        for command in commands:
            name, methods = command.name or path.rpartition("/")[2], list(command.methods)
            has_body = command.body is not None and "GET" not in methods
            described = takes(command.body, *command.refusals) if has_body else answers(*command.refusals)
            router.add_api_route(path, _responding(command, state), methods=methods, name=name, **described)
    return router


def _responding(command: Command, state: ApiState) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await command.respond(state, request)

    return respond


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
            if isinstance(bucket, SentAdapter) and options.lora_name and holds_beside(state):
                return outcome_answer(await take_sent_adapter(Fleet(state), bucket, name=options.lora_name, sent=body))
            try:
                order = _order_of(options, adapter=sent_name(state, bucket, name=options.lora_name))
                outcome = await Fleet(state).stage_bucket(bucket, sent=body, order=order)
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


def _order_of(options: BucketOptions, *, adapter: str | None) -> BucketOrder:
    order = WeightOrder("", options.weight_version or None, aborts_requests=options.abort_all_requests, adapter=adapter)
    return BucketOrder(options.update_id, order, options.bucket, options.last)


async def _bucket_of(
    request: Request, state: ApiState, update_id: str, *, body: bytearray
) -> SentBucket | SentAdapter | str:
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
