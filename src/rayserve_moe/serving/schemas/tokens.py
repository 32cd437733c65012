"""Body of `/inference/v1/generate`, tokens in and tokens out, in vLLM's dialect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rayserve_moe.constraint_fields import ConstraintFields
from rayserve_moe.request_fields import INT32_MAX, VLLM
from rayserve_moe.requests import GenerationRequest, SamplingParams
from rayserve_moe.serving.schemas.field_types import (
    ListedIds,
    LogprobsMode,
    NumTopLogprobs,
    RequestBody,
    RequestId,
    RoutingFormat,
    record_fields,
)
from rayserve_moe.serving.schemas.openai import StreamedBody
from rayserve_moe.serving.schemas.prompt_types import TokenIds

START = "routed_experts_prompt_start"
IN_SAMPLING = ("logprob_token_ids", "logprobs_mode", "thinking_token_budget")
"""Fields that are no sampling parameters elsewhere."""


@record_fields(VLLM, SamplingParams)
@record_fields(VLLM, ConstraintFields)
class TokenSampling(RequestBody):
    """`sampling_params`: `logprobs` 0 or 1 gives the sampled tokens' alone, more gives as many of the likeliest."""

    logprobs: NumTopLogprobs | None = None
    prompt_logprobs: NumTopLogprobs | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    logprob_token_ids: ListedIds = ()
    logprobs_mode: LogprobsMode = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None


@record_fields(VLLM, GenerationRequest, without={START, "logprobs_mode"})
class TokenBody(StreamedBody):
    """One prompt of token ids. Routing comes back where the server captures it, unless it is switched off."""

    token_ids: TokenIds
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: RequestId | None = None
    return_routed_experts: bool | None = None
    routed_experts_format: RoutingFormat = "packed"
    routed_experts_dtype: Literal["int16"] | None = None
    return_token_ids: bool = False

    def given(self) -> dict[str, Any]:
        """Return the values of both objects. One likeliest token would be no entry of its own: none is computed."""
        params = dict(self.sampling_params)
        return {**dict(self), **params, "logprobs": 0 if params["logprobs"] == 1 else params["logprobs"]}
