"""Unsupported routes of other servers: each answers 501 with the alternative."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.openapi import answers

_INSTEAD = "POST safetensors to /update_weights_from_tensor, or the path of a checkpoint to /update_weights_from_disk"
BY_COLLECTIVE = f"weights do not arrive over NCCL collectives here: {_INSTEAD}"
_BY_MEMORY = f"weights do not arrive as CUDA memory handles here: {_INSTEAD}"
_MEMORY = "device memory stays with the server while it runs: stop it to have the memory"

_ADAPTERS = (
    "adapters do not arrive as pickled tensors, device handles or by NCCL: load them from disk by /load_lora_adapter, "
    "or POST safetensors with `adapter_config` in their metadata to /update_weights_from_tensor"
)
_READ = "weights are checked as they are read: a wrong checkpoint is refused by /update_weights_from_disk"
_PROFILE = "profiles are switched on by settings, not by requests"
_GENERATION = "this server generates tokens and embeddings: it has no classes"
_UNSUPPORTED_CONTROL = {
    BY_COLLECTIVE: """/init_weights_update_group /destroy_weights_update_group /update_weights_from_distributed
        /init_weight_transfer_engine /start_weight_update /finish_weight_update /collective_rpc /fetch_weights
        /pull_weights /areal_init_weights_update_group /areal_set_update_weight_meta /areal_update_weights_xccl
        /areal_set_update_weight_meta_lora /areal_update_weights_lora_xccl""",
    _BY_MEMORY: "/post_process_weights",
    _MEMORY: "/release_memory_occupation /resume_memory_occupation /sleep /wake_up",
    _ADAPTERS: """/load_lora_adapter_from_tensors /load_lora_adapter_from_distributed /register_lora_adapter
        /areal_update_weights_lora""",
    _READ: "/weights_checker /weight_checker",
    _PROFILE: "/start_profile /stop_profile",
}
_UNSUPPORTED = {
    _GENERATION: "/classify",
    "prompts are rendered by /tokenize: send it the messages": "/v1/chat/completions/render",
}

UNSUPPORTED_CONTROL = {path: reason for reason, paths in _UNSUPPORTED_CONTROL.items() for path in paths.split()}
REASONS = UNSUPPORTED_CONTROL | {path: reason for reason, paths in _UNSUPPORTED.items() for path in paths.split()}


def unsupported_router() -> APIRouter:
    """Return routes that answer 501."""
    router = APIRouter()
    for path, reason in REASONS.items():
        router.add_api_route(path, _refusal(reason), methods=["POST"], **answers(413, 501))
    return router


def _refusal(reason: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(501, reason, code="not_implemented")

    return refuse
