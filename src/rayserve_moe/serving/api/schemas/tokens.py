"""Body of `/inference/v1/generate`, tokens in and out, in vLLM's dialect."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import INT32_MAX, MAX_LISTED_IDS, VLLM, is_token_id
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api.schemas.field_types import (
    ListedIds,
    LogprobsMode,
    NumTopLogprobs,
    RequestBody,
    RequestId,
    RoutingFormat,
    fault,
    record_fields,
)
from rayserve_moe.serving.api.schemas.openai import StreamedBody
from rayserve_moe.serving.api.schemas.prompt_types import TokenIds

MAX_ROWS = 1 << 20
START = "routed_experts_prompt_start"
IN_SAMPLING = ("logprob_token_ids", "logprobs_mode", "thinking_token_budget")
"""Fields that are not sampling parameters in other dialects."""


def _rows_of_ids(value: object) -> np.ndarray:
    """Return rows of ids, int32 [N, L], padded with -1."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_ROWS or not all(map(_is_row, value)):
        raise fault(f"should be lists of up to {MAX_LISTED_IDS} token ids, -1 for none, one for each position")
    width = max(map(len, value))
    return np.array([row + [-1] * (width - len(row)) for row in value], np.int32)


def _is_row(row: object) -> bool:
    return isinstance(row, list) and 0 < len(row) <= MAX_LISTED_IDS and all(is_token_id(i) or i == -1 for i in row)


_ROW = {"type": "array", "items": {"type": "integer", "minimum": -1}, "minItems": 1, "maxItems": MAX_LISTED_IDS}
ListedRows = Annotated[
    Any, PlainValidator(_rows_of_ids), WithJsonSchema({"type": "array", "items": _ROW, "minItems": 1})
]


@record_fields(VLLM, SamplingParams)
@record_fields(VLLM, ConstraintFields)
class TokenSampling(RequestBody):
    """The `sampling_params` object. `logprobs` 0 or 1 scores only sampled tokens, n > 1 adds the n likeliest.

    `prompt_logprob_token_ids` are rows of ids, -1 for padding, to be scored after each position of the prompt from
    `prompt_logprob_start`.
    """

    logprobs: NumTopLogprobs | None = None
    prompt_logprobs: NumTopLogprobs | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    logprob_token_ids: ListedIds = ()
    logprobs_mode: LogprobsMode = None
    prompt_logprob_token_ids: ListedRows = None
    prompt_logprob_start: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None


@record_fields(VLLM, GenerationRequest, without={START, "logprobs_mode"})
class TokenBody(StreamedBody):
    """Prompt of token ids. Routing is returned if the server captures it, unless it is switched off."""

    token_ids: TokenIds
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: RequestId | None = None
    return_routed_experts: bool | None = None
    routed_experts_format: RoutingFormat = "packed"
    routed_experts_dtype: Literal["int16"] | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _whole_answers_list(self) -> Self:
        params = self.sampling_params
        if params.prompt_logprob_token_ids is None and params.prompt_logprob_start is not None:
            raise fault("`prompt_logprob_start` is only for requests with `prompt_logprob_token_ids`")
        if params.prompt_logprob_token_ids is not None and self.stream:
            raise fault("`prompt_logprob_token_ids` is only for requests without `stream`")
        return self

    def given(self) -> dict[str, Any]:
        """Return the fields of both objects. `logprobs` 1 becomes 0: the likeliest token would not be returned."""
        params = dict(self.sampling_params)
        return {**dict(self), **params, "logprobs": 0 if params["logprobs"] == 1 else params["logprobs"]}
