"""How busy every expert is, and what balancing does about it: a page, and the numbers that it draws."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import to_json

PAGE = Path(__file__).with_name("experts_page.html")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def experts_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine. The page holds no numbers: it asks for them with the key that it is given."""
    router = APIRouter()
    page = PAGE.read_text(encoding="utf-8")

    @router.get("/experts", **answers(kinds=("text/html",)))
    async def experts() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @router.get("/experts/state", **answers())
    async def experts_state() -> Response:
        balancing = state.balancing or state.loop.expert_counting
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(state.encoding, lambda: to_json(balancing.view().as_json()))
        return Response(text, media_type="application/json")

    return router
