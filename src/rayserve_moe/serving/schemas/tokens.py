"""Body of `/inference/v1/generate`, tokens in and tokens out, in vLLM's dialect."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rayserve_moe.serving.schemas.field_types import (
    CacheSalt,
    MaxTokens,
    NumTopLogprobs,
    RequestId,
    RoutingFormat,
    Seed,
    fault,
)
from rayserve_moe.serving.schemas.openai import StreamOptions
from rayserve_moe.serving.schemas.prompt_types import TokenIds
from rayserve_moe.serving.schemas.routing_fields import RoutingFields, RowStart
from rayserve_moe.serving.schemas.sampling_fields import SamplingFields, VllmEnds


class TokenSampling(SamplingFields, VllmEnds):
    """`sampling_params`: `logprobs` 0 or 1 gives the sampled tokens' alone, more gives as many of the likeliest."""

    max_tokens: MaxTokens | None = None
    seed: Seed | None = None
    logprobs: NumTopLogprobs | None = None
    prompt_logprobs: NumTopLogprobs | None = None
    routed_experts_prompt_start: RowStart = 0


class TokenBody(RoutingFields):
    """One prompt of token ids. Routing comes back where the server captures it, unless it is switched off."""

    token_ids: TokenIds
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    cache_salt: CacheSalt = ""
    request_id: RequestId | None = None
    stream_options: StreamOptions | None = None
    return_routed_experts: bool | None = None
    routed_experts_format: RoutingFormat = "packed"
    routed_experts_dtype: Literal["int16"] | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("`stream_options` is only for requests with `stream` true")
        return self
