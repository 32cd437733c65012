"""Answers in the rollout container: the JSON fields in a header, routing rows raw behind it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE, encode_rollout
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.responses.answering import Writer, respond
from rayserve_moe.serving.responses.request_streams import RequestStreams
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.responses.streaming import to_json


def rollout_type(request: Request, *, streams: bool) -> str | None:
    """Return the container's media type that the client accepts first, None where it accepts none.

    ApiError where the request also streams: events are text.
    """
    accepted = [entry.partition(";")[0].strip().lower() for entry in request.headers.get("accept", "").split(",")]
    wanted = next((kind for kind in accepted if kind in (ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE)), None)
    if wanted and streams:
        raise ApiError(400, "a stream cannot be answered in the rollout media type: leave out one of the two")
    return wanted


async def respond_in_rollout(
    state: ApiState,
    request: Request,
    *,
    streams: RequestStreams,
    writer: Writer,
    routing: RoutingWriter,
    media_type: str,
) -> Response:
    """Wait for the whole answer and send it in a container; several answers of a batch stand under `answers`."""
    compress = media_type == ROLLOUT_ZSTD_MEDIA_TYPE

    def to_container(answer: dict | list) -> bytes:
        header = {"answers": answer} if isinstance(answer, list) else answer
        return encode_rollout(header, routing.raw_rows, compress=compress, to_json=to_json)

    return await respond(state, request, streams=streams, writer=writer, to_body=to_container, media_type=media_type)
