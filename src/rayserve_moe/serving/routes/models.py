"""The model, the version of its weights, and the server's statistics."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.fleet_control import ask_all
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer

_NAME_IN_PATH = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}


def model_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()

    @router.get("/v1/models", **answers())
    async def models() -> Response:
        return json_answer({"object": "list", "data": [_model_object(state)]})

    @router.get("/v1/models/{name:path}", **answers(404), openapi_extra=_NAME_IN_PATH)
    async def model(request: Request) -> Response:
        if request.path_params["name"] != state.card.name:
            raise ApiError(404, "no such model", param="model", code="model_not_found")
        return json_answer(_model_object(state))

    @router.get("/model_info", **answers())
    @router.get("/get_model_info", **answers())
    async def model_info() -> Response:
        return json_answer(_model_description(state))

    @router.get("/server_info", **answers())
    @router.get("/get_server_info", **answers())
    async def server_info() -> Response:
        answers = await ask_all(state, "statistics")
        about = {**_model_description(state), "version": package_version()}
        if (alone := answers.by_replica.get("")) is not None:
            return json_answer({**about, "statistics": alone.value})
        each = answers.values_by_replica
        return json_answer({**about, "replicas": each, "missing": list(answers.missing)})

    _add_versions(router, state)
    return router


def _add_versions(router: APIRouter, state: ApiState) -> None:
    """Add routes that answer one value each."""

    @router.get("/weight_info", **answers())
    @router.get("/get_weight_version", **answers())
    async def get_weight_version() -> Response:
        answers = await ask_all(state, "weight_version")
        if "" in answers.by_replica:
            return json_answer({"weight_version": state.card.weight_version})
        each = answers.values_by_replica
        version = {"weight_version": state.card.weight_version, "replicas": each, "missing": list(answers.missing)}
        return json_answer({**version, "agree": not answers.missing and len(set(each.values())) == 1})

    @router.get("/version", **answers())
    async def version() -> Response:
        return json_answer({"version": package_version()})

    @router.get("/get_world_size", **answers(400))
    async def get_world_size(request: Request) -> Response:
        if request.query_params.get("include_dp", "true").lower() not in ("true", "1"):
            raise ApiError(400, "`include_dp` is not supported: leave it out", param="include_dp")
        return json_answer({"world_size": state.loop.start_report.num_expert_ranks})


def package_version() -> str:
    """Return the installed version of this package."""
    try:
        return metadata.version("rayserve_moe")
    except metadata.PackageNotFoundError:
        return "unknown"


def _model_object(state: ApiState) -> dict:
    card = state.card
    return {
        "id": card.name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "rayserve_moe",
        "max_model_len": card.max_model_len,
        "weight_version": card.weight_version,
    }


def _model_description(state: ApiState) -> dict:
    card = state.card
    return {
        "model_path": card.path,
        "tokenizer_path": str(state.tokenizer.directory),
        "served_model_name": card.name,
        "is_generation": True,
        "weight_version": card.weight_version,
        "max_model_len": card.max_model_len,
        "vocab_size": card.vocab_size,
        "enable_return_routed_experts": card.returns_routing,
        "num_hidden_layers": card.routing.num_hidden_layers,
        "moe_layer_ids": list(card.routing.layer_ids),
        "num_experts": card.routing.num_experts,
        "num_experts_per_tok": card.routing.top_k,
        "dtype": state.loop.start_report.dtype,
        "float32_tensors": list(state.loop.start_report.float32_tensors),
    }
