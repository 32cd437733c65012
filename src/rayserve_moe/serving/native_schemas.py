"""Body of `/generate`, the native route in SGLang's dialect."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from rayserve_moe.serving.field_types import (
    MAX_PROMPTS,
    CacheSalt,
    EmptyString,
    FalseOnly,
    IdsBatch,
    MaxTokens,
    PromptBatch,
    RequestBody,
    Seed,
    TextBatch,
    ZeroOnly,
    fault,
)
from rayserve_moe.serving.sampling_fields import SamplingFields

_LONGEST_RID = 256


def _check_rids(value: object) -> str | list[str]:
    rids = value if isinstance(value, list) else [value]
    if not all(isinstance(rid, str) and 0 < len(rid) <= _LONGEST_RID for rid in rids) or len(rids) > MAX_PROMPTS:
        raise fault(f"should be a string of 1 to {_LONGEST_RID} characters or a list of such")
    if len(set(rids)) != len(rids):
        raise fault("should not hold the same id twice")
    return value if isinstance(value, list) else str(value)


def _as_list(value: object) -> list:
    if not isinstance(value, dict | list):
        raise fault("should be an object or a list of objects")
    return value if isinstance(value, list) else [value]


class NativeSampling(SamplingFields):
    """One `sampling_params` object."""

    max_new_tokens: MaxTokens = 128
    sampling_seed: Seed | None = None
    min_new_tokens: ZeroOnly = 0
    json_schema: EmptyString = ""
    regex: EmptyString = ""
    ebnf: EmptyString = ""
    stop_regex: EmptyString = ""
    structural_tag: EmptyString = ""
    no_stop_trim: FalseOnly = False


class GenerateBody(RequestBody):
    """One prompt or a batch, as text or as token ids; `sampling_params` holds one object, or one per prompt."""

    text: TextBatch | None = None
    input_ids: IdsBatch | None = None
    sampling_params: Annotated[list[NativeSampling], BeforeValidator(_as_list)] = [NativeSampling()]
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: ZeroOnly = 0
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    cache_salt: CacheSalt = ""
    rid: Annotated[str | list[str] | None, PlainValidator(_check_rids)] = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise fault("give exactly one of `text` and `input_ids`")
        num_prompts = len(self.batch.prompts)
        if len(self.sampling_params) not in (1, num_prompts):
            raise fault("`sampling_params` should hold one object per prompt")
        if isinstance(self.rid, list) and len(self.rid) != num_prompts:
            raise fault("`rid` should hold one id per prompt")
        return self

    @property
    def batch(self) -> PromptBatch:
        """The prompts, in whichever of the two forms they came."""
        given = self.text or self.input_ids
        assert given is not None, "checked when the body was read"
        return given
