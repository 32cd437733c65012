"""The sampling fields that all generating routes share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rayserve_moe.requests import SamplingParams
from rayserve_moe.serving.schemas.field_types import (
    LogitBias,
    MinP,
    MinTokens,
    NumChoices,
    Penalty,
    RepetitionPenalty,
    RequestBody,
    StopStrings,
    StopTokenIds,
    TopK,
    TopP,
)


class SamplingFields(RequestBody):
    """How tokens are chosen, in the names that every dialect uses."""

    n: NumChoices = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = Field(default_factory=tuple)

    def sampling(self, max_new_tokens: int, seed: int | None, **ends: Any) -> SamplingParams:
        """Return the engine's form; `ends` are the fields in which dialects differ."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
            seed=seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            **ends,
        )


class VllmEnds(RequestBody):
    """When a choice may end, and what is told of its end, in vLLM's dialect: stop strings wait for `min_tokens` too."""

    min_tokens: MinTokens = 0
    include_stop_str_in_output: bool = False

    @property
    def ends(self) -> dict[str, Any]:
        """The engine's names."""
        return {
            "min_new_tokens": self.min_tokens,
            "stop_strings_after": self.min_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
