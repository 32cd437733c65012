"""Routes of other servers that are not supported here: each answers 501 and names what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.openapi import answers

_INSTEAD = "write a checkpoint and POST its path to /update_weights_from_disk"
_BY_COLLECTIVE = f"weights do not arrive over NCCL collectives here: {_INSTEAD}"
_BY_MEMORY = f"weights do not arrive as CUDA memory handles here: {_INSTEAD}"
_MEMORY = "device memory stays with the server while it runs: stop it to have the memory"

REASONS = {
    "/init_weights_update_group": _BY_COLLECTIVE,
    "/destroy_weights_update_group": _BY_COLLECTIVE,
    "/update_weights_from_distributed": _BY_COLLECTIVE,
    "/update_weights_from_tensor": _BY_MEMORY,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
}


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
