"""Bodies of the control routes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rayserve_moe.config.given_files import is_url
from rayserve_moe.serving.schemas.field_types import RequestBody, fault

_LONGEST_PATH = 4096


def _absolute(path: str) -> str:
    if not (path.startswith("/") or is_url(path)) or "\0" in path:
        raise fault("should be an absolute path or a URL")
    return path


class AbortBody(RequestBody):
    """Body of `/abort_request`: the id of a request, or of a batch, or everything."""

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.rid and not self.abort_all:
            raise fault("give `rid`, or `abort_all` true")
        return self


class PauseBody(RequestBody):
    """Body of `/pause_generation`: requests there are end, wait without their pages, or stay as they are."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateWeightsBody(RequestBody):
    """Body of `/update_weights_from_disk`: a directory that every host sees, or a URL, and the name of its weights.

    The prefix cache is always flushed: it holds keys and values of the old weights. `flush_cache` has no effect.
    """

    model_path: Annotated[
        str,
        Field(max_length=_LONGEST_PATH, json_schema_extra={"pattern": r"^(/|[a-z][a-z0-9+.-]*://)[^\x00]*$"}),
        AfterValidator(_absolute),
    ]
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] = ""
    flush_cache: bool = True
    abort_all_requests: bool = False
