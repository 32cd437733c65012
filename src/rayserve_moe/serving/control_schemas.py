"""Bodies of the control routes."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from rayserve_moe.serving.field_types import RequestBody, fault


class AbortBody(RequestBody):
    """Body of `/abort_request`: the id of a request, or of a batch, or everything."""

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.rid and not self.abort_all:
            raise fault("give `rid`, or `abort_all` true")
        return self
