"""Route `/resume_request`: the rest of a stream, or the whole of a plain answer, on any replica."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rayserve_moe.serving.api.schemas.resume import ResumeBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.journalling import Asking, Resumed, caller_of, identity_of, resumed_scope, take_over
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates


def resume_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/resume_request", **generates(ResumeBody, in_containers=True))
    async def resume_request(request: Request) -> Response:
        body = await read_body(request, ResumeBody, admission=state.admission)
        if state.journal is None:
            raise ApiError(404, "this server keeps no requests: see the setting `journal`", code="no_journal")
        caller = caller_of(request.scope)
        identity = identity_of(caller, body.rid)
        resumed = await take_over(state.journal, identity, told=body.from_token, capacity=state.loop.capacity)
        asked = resumed.asked
        asking = Asking(state.journal, asked.path, caller, body.rid, asked.accept, "", asked.body)
        asking.resume(resumed)
        return _Replayed(request, asking, resumed=resumed)

    return router


class _Replayed(Response):
    """Answer of the original route to the original body."""

    def __init__(self, request: Request, asking: Asking, *, resumed: Resumed) -> None:
        super().__init__()
        self._request, self._asking, self._resumed = request, asking, resumed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._resumed.asked
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"content-length")]
        headers += [(b"accept", asked.accept.encode("latin-1")), (b"last-event-id", b"")]
        path = scope.get("root_path", "") + asked.path
        parts: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive_asked() -> Message:
            return parts.pop() if parts else await receive()

        again = {**scope, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        again |= resumed_scope(self._asking)
        try:
            await self._request.app.router(again, receive_asked, send)
        finally:
            self._asking.journal.close(self._resumed.ticket)
