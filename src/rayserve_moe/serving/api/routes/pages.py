"""Pages for browsers: `/` chats, `/experts` draws loads, `/docs` shows the API. They hold no numbers and need no key.

Their scripts request everything from the routes of the API, with the key that a user types. Each page is one document
without external resources.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rayserve_moe.serving.accepted_types import accepted_types
from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.errors import as_api_error, path_of
from rayserve_moe.serving.openapi import answers

FOLDER = Path(__file__).parents[2] / "pages"
PAGES = {"/": "chat.html", "/experts": "experts.html", "/docs": "docs.html"}
"""File of each page by path."""
_SHARED = {"/* page.css */": "page.css", "/* page.js */": "page.js", "<!-- header.html -->": "header.html"}
"""Files that every page includes, by the line that stands for each."""
_HTML = "text/html"
INDEX = {
    "object": "server",
    "name": "rayserve_moe",
    "pages": ["/", "/experts", "/docs"],
    "description": "/openapi.json",
    "chat": "/v1/chat/completions",
    "health": "/health",
}
"""Answer of `/` to a client that does not accept HTML; paths are relative to the server's prefix."""


class Page(NamedTuple):
    """HTML document with the headers of its answer."""

    text: str
    headers: dict[str, str]


def read_page(path: str) -> Page:
    """Return the page of a path with its policy: only its own script and style apply, and only this server answers."""
    text = (FOLDER / PAGES[path]).read_text(encoding="utf-8")
    for line, name in _SHARED.items():
        text = text.replace(line, (FOLDER / name).read_text(encoding="utf-8").rstrip("\n"))
    href = path.removeprefix("/") or "./"
    text = text.replace(f'<a href="{href}">', f'<a href="{href}" aria-current="page">')
    scripts, styles = (_hashes_of(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",  # a browser keeps the page, and asks whether it has changed
        "ETag": f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text, headers)


def _hashes_of(text: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def pages_router() -> APIRouter:
    """Return the routes of the pages."""
    router = APIRouter()
    for path in PAGES:
        kinds = (_HTML, "application/json") if path == "/" else (_HTML,)
        route = _route_of(read_page(path), has_index=path == "/")
        router.add_api_route(path, route, methods=["GET"], **answers(kinds=kinds))
        router.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
    return router


def _route_of(page: Page, *, has_index: bool) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    varied = {"Vary": "Accept"} if has_index else {}

    async def route(request: Request) -> Response:
        if has_index and _HTML not in accepted_types(request):
            index = json_answer(INDEX)
            index.headers.update(varied)
            return index
        headers = {**page.headers, **varied}
        if page.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(page.text, headers=headers, media_type=_HTML)

    return route


async def answer_unknown_route(request: Request, error: Exception) -> Response:
    """Answer 404, or redirect from the server's bare prefix to the prefix with a slash, which is a page.

    Pages request relative paths, which lead elsewhere from a prefix without a slash.
    """
    path = path_of(request.scope)
    if path or request.method not in ("GET", "HEAD"):
        return as_api_error(error).response(path)
    return RedirectResponse(request.url.replace(path=f"{request.url.path}/"), status_code=308)
