"""`SamplingParams` under vLLM's names, as `LLM` takes them, and the engine request that they become."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from rayserve_moe.inprocess.arguments import sampling_from
from rayserve_moe.requests import GenerationRequest, ModelCard, RequestError
from rayserve_moe.requests import SamplingParams as EngineSampling

TOLD = {"logprobs", "prompt_logprobs", "routed_experts_prompt_start"}
"""What says nothing of how tokens are chosen, only what is told about them."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one prompt are chosen, and what is told about them.

    `temperature` 0 is greedy; `top_k` 0 or -1 and `top_p` 1 keep the whole vocabulary. `max_tokens` 0 runs the prompt
    only, None goes on to the end of the context. `logprobs` k tells the log-prob of every token and of the k likeliest
    ones beside it, `prompt_logprobs` those of the prompt. Nothing ends within the first `min_tokens` tokens, and the
    text holds what it stopped at where `include_stop_str_in_output`. Routing rows before position
    `routed_experts_prompt_start` are left out.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0


def engine_sampling(params: SamplingParams, *, most_new_tokens: int) -> EngineSampling:
    """Say the same to the engine; `most_new_tokens` is what the context has room for."""
    named = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in TOLD}
    if params.max_tokens is None:
        named["max_tokens"] = most_new_tokens
    return sampling_from({**named, "logit_bias": params.logit_bias or {}})


def request_with(
    prompt_ids: np.ndarray, params: SamplingParams, *, card: ModelCard, cache_salt: str
) -> GenerationRequest:
    """Ask the engine for a prompt, and for its routing wherever the engine captures that."""
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) < 0:
            raise RequestError(f"{name} must be None or at least 0: all of the vocabulary is never returned", name)
    if not 0 <= params.routed_experts_prompt_start <= len(prompt_ids):
        raise RequestError(
            "routed_experts_prompt_start must lie between 0 and the number of prompt tokens",
            "routed_experts_prompt_start",
        )
    return GenerationRequest(
        uuid.uuid4().hex,
        prompt_ids,
        engine_sampling(params, most_new_tokens=card.max_model_len - len(prompt_ids)),
        return_routed_experts=card.returns_routing,
        cache_salt=cache_salt,
        incremental=bool(params.stop),
        num_top_logprobs=max(params.logprobs or 0, params.prompt_logprobs or 0),
        score_prompt_from=None if params.prompt_logprobs is None else 0,
        routed_experts_start=params.routed_experts_prompt_start,
    )
