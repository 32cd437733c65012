"""Bodies of the control routes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rayserve_moe.config.given_files import is_url
from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES, RequestBody, RequestId, fault

_MAX_PATH = 4096
_MAX_EXPERTS, _MAX_LAYERS = 1 << 16, 1024


def _absolute(path: str) -> str:
    if not (path.startswith("/") or is_url(path)) or "\0" in path:
        raise fault("should be an absolute path or a URL")
    return path


class AbortBody(RequestBody):
    """Body of `/abort_request`: the id of a request or batch, or a prefix of ids, or everything."""

    rid: str = ""
    abort_all: bool = False
    prefix: bool = False

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.rid and not self.abort_all:
            raise fault("give `rid`, or `abort_all` true")
        return self


class PauseBody(RequestBody):
    """Body of `/pause_generation`: running requests end, are preempted, or stay unchanged."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class PauseOptions(RequestBody):
    """Options of `/pause`: requests end, stay unchanged, or are awaited.

    Without remaining requests, the prefix cache is also flushed.
    """

    mode: Literal["abort", "keep", "wait"] = "abort"
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False


class ResetOptions(RequestBody):
    """Options of `/flush_cache` and `/reset_prefix_cache`: optionally preempt running requests first."""

    reset_running_requests: bool = False


class PlacementBody(RequestBody):
    """Body of `/experts/placement`: the content of a placement file, with a row per layer with experts."""

    num_experts: Annotated[int, Field(ge=1, le=_MAX_EXPERTS)]
    ep_size: Annotated[int, Field(ge=1, le=_MAX_EXPERTS)]
    expert_of_slot: Annotated[list[list[int]], Field(min_length=1, max_length=_MAX_LAYERS)]
    share_of_slot: Annotated[list[list[float]], Field(max_length=_MAX_LAYERS)] | None = None
    weight_version: Annotated[str, Field(max_length=256)] = ""


class AbortIdsBody(RequestBody):
    """Body of `/abort_requests`: ids of requests; an empty list aborts everything."""

    request_ids: Annotated[list[RequestId], Field(max_length=MAX_CHOICES)] = Field(default_factory=list)


class WeightNameBody(RequestBody):
    """Body of `/update_weight_version`: the new version of the serving weights."""

    new_version: Annotated[str, Field(min_length=1, max_length=256)]
    abort_all_requests: bool = False


CheckpointPath = Annotated[
    str,
    Field(max_length=_MAX_PATH, json_schema_extra={"pattern": r"^(/|[a-z][a-z0-9+.-]*://)[^\x00]*$"}),
    AfterValidator(_absolute),
]


AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterBody(RequestBody):
    """Body of `/load_lora_adapter`: a directory of PEFT's files, and the name that requests may call it by.

    It replaces the adapter of its name, so that `load_inplace` and `pinned` have no effect.
    """

    lora_name: AdapterName
    lora_path: CheckpointPath
    load_inplace: bool = True
    pinned: bool = True
    merge: bool = False
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] = ""
    abort_all_requests: bool = False


class UnloadAdapterBody(RequestBody):
    """Body of `/unload_lora_adapter`: the name of an adapter."""

    lora_name: AdapterName
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] = ""
    abort_all_requests: bool = False


class WeightDirBody(RequestBody):
    """Body of `/update_weights`: a directory as in `/update_weights_from_disk`; without it, a collective's update."""

    weight_dir: CheckpointPath | None = None


class UpdateWeightsBody(RequestBody):
    """Body of `/update_weights_from_disk`: a directory visible to every host, or a URL, and the version of its weights.

    The prefix cache is always flushed, because it holds keys and values of the old weights. `flush_cache` has no
    effect.
    """

    model_path: CheckpointPath
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] = ""
    flush_cache: bool = True
    abort_all_requests: bool = False


class BucketOptions(RequestBody):
    """Query of `/update_weights_from_tensor`: update of a bucket, number from 0, and a flag for the last bucket.

    `lora_name` is the name of an adapter, which is a single bucket.

    The other fields apply to the last bucket, as in `/update_weights_from_disk`.
    """

    update_id: RequestId
    bucket: Annotated[int, Field(ge=0)] | None = None
    last: bool = False
    lora_name: Annotated[str, Field(max_length=256)] = ""
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] = ""
    flush_cache: bool = True
    abort_all_requests: bool = False
