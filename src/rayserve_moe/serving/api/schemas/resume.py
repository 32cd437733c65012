"""Body of `/resume_request`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES, RequestBody

_Count = Annotated[int, Field(ge=0)]


def _one_sentence(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise ValueError("should be a number of tokens, from 0 on, or a list with one for each choice") from error


Cursor = Annotated[_Count | Annotated[list[_Count], Field(max_length=MAX_CHOICES)], WrapValidator(_one_sentence)]


class ResumeBody(RequestBody):
    """Request to resume, and the tokens that its client has received."""

    rid: str = Field(min_length=1, max_length=256)
    """The `rid`, `request_id` or `X-Request-Id` of the request."""
    from_token: Cursor = 0
    """Tokens that the client has: a number for every choice, or a list; the end of a choice counts as a token."""
