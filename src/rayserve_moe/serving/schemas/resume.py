"""The body of `/resume_request`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayserve_moe.serving.schemas.field_types import RequestBody

Cursor = Annotated[int, Field(ge=0)]


class ResumeBody(RequestBody):
    """Which request, and what its client has of it."""

    rid: str = Field(min_length=1, max_length=256)
    """The `rid`, `request_id` or `X-Request-Id` of the request."""
    from_token: Cursor | Annotated[list[Cursor], Field(max_length=4096)] = 0
    """Tokens of every choice that the client has, or a number for each; the end of a choice counts as one more."""
