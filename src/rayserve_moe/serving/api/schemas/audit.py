"""Body of `/audit`: trajectories with their rows, log-probs, masks and versions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.requests.fields import INT32_MAX, is_token_id
from rayserve_moe.serving.api.schemas.field_types import ForcedRouting, RequestBody, fault
from rayserve_moe.serving.api.schemas.prompt_types import TokenIds

MAX_SAMPLES = 256
_Tolerance = Annotated[float, Field(ge=0, le=1e6)]


def _masks(value: object) -> list[list[int]]:
    masks = value if isinstance(value, list) else [None]
    if not all(isinstance(mask, list) and all(map(is_token_id, mask)) for mask in masks):
        raise fault("should be a list with the token ids of each output's mask")
    return masks


_MASK_SCHEMA = {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}}
Masks = Annotated[Any, PlainValidator(_masks), WithJsonSchema(_MASK_SCHEMA)]


class AuditSample(RequestBody):
    """A trajectory. Its rows begin at the first token; log-probs and masks are of the tokens behind the prompt."""

    input_ids: TokenIds
    prompt_len: Annotated[int, Field(ge=1, le=INT32_MAX)]
    forced_routed_experts: ForcedRouting
    forced_indexer_topk: ForcedRouting = None
    forced_router_gates: ForcedRouting = None
    logprobs: list[float] | None = None
    sampling_mask: Masks = None
    weight_version: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        num_outputs = len(self.input_ids) - self.prompt_len
        if num_outputs < 0:
            raise fault("`prompt_len` should be at most the number of `input_ids`")
        for name, values in (("logprobs", self.logprobs), ("sampling_mask", self.sampling_mask)):
            if values is not None and len(values) != num_outputs:
                raise fault(f"`{name}` should have an entry for each of the tokens behind the prompt")
        return self


class AuditBody(RequestBody):
    """Trajectories to audit, and the differences that rounding explains."""

    samples: Annotated[list[AuditSample], Field(min_length=1, max_length=MAX_SAMPLES)]
    tie_tolerance: _Tolerance = 0.05
    logprob_tolerance: _Tolerance = 0.05
    return_sketches: bool = False
