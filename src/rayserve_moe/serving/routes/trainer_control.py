"""Control of a server under the names of vLLM, Miles and AReaL. SGLang's own are in `control`."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.fleet_control import ask_every, pause_all, rename_all
from rayserve_moe.serving.middleware.json_body import read_body, read_options
from rayserve_moe.serving.openapi import COMMAND, answers, takes
from rayserve_moe.serving.responses.streaming import json_answer, while_connected
from rayserve_moe.serving.routes.control import check_admin, update_answer
from rayserve_moe.serving.routes.unsupported import BY_COLLECTIVE
from rayserve_moe.serving.schemas.control import (
    AbortIdsBody,
    PauseOptions,
    UpdateWeightsBody,
    WeightDirBody,
    WeightNameBody,
)

_AT_ONCE = "weights change between two steps, once all of them are there: nothing is to be begun or ended"
_MODES = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
_POLL_S = 0.02


def trainer_control_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
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
    """Wait until every request has ended that there is now; later ones do not begin. Undone where it is cut short."""
    await ask_every(state, "hold_new", True)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(_end_hold, state)
        while any(await ask_every(state, "num_unended")):  # noqa: ASYNC110 (others' engines)
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
