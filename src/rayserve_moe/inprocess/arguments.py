"""From the arguments of `Engine.generate` to generation requests."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayserve_moe.requests import GenerationRequest, RequestError, SamplingParams
from rayserve_moe.text.tokenizer import Tokenizer

RENAMED = {"max_tokens": "max_new_tokens", "sampling_seed": "seed"}
SEQUENCES = ("stop", "stop_token_ids")


def prompts_from(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | None, *, input_ids: Sequence[Any] | None
) -> tuple[list[np.ndarray], bool]:
    """Return every prompt as int32 ids, and whether the caller gave a batch. Exactly one of the two must be given."""
    if prompt is not None and input_ids is None:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [tokenizer.encode(text) for text in texts]
        is_batch = not isinstance(prompt, str)
    elif input_ids is not None and prompt is None:
        is_batch = len(input_ids) > 0 and not np.isscalar(input_ids[0])
        ids = list(input_ids) if is_batch else [input_ids]
    else:
        raise RequestError("give either prompt (text) or input_ids", "prompt")
    return [_token_ids(one) for one in ids], is_batch


def single_prompt_from(tokenizer: Tokenizer, prompt: str | None, *, input_ids: Sequence[int] | None) -> np.ndarray:
    """Return the only prompt as int32 ids; RequestError for a batch, of which all but one would be lost."""
    prompts, is_batch = prompts_from(tokenizer, prompt, input_ids=input_ids)
    if is_batch:
        raise RequestError("one prompt at a time here; generate takes batches", "prompt")
    return prompts[0]


def _token_ids(values: Any) -> np.ndarray:
    """Take over one prompt's ids as int32 [prompt_len], unless they are no integers that fit."""
    ids = np.asarray(values)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise RequestError("input_ids must be one list of token ids per prompt", "input_ids")
    return ids.astype(np.int32)


def sampling_from(values: Mapping[str, Any]) -> SamplingParams:
    """Build SamplingParams from SGLang's names; RequestError names an unknown one."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    named = {RENAMED.get(key, key): value for key, value in values.items()}
    if unknown := sorted(set(named) - known):
        raise RequestError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])
    for key in SEQUENCES:
        if key in named:
            value = named[key]
            named[key] = () if value is None else (value,) if isinstance(value, str | int) else tuple(value)
    if named.get("top_k", 0) == -1:
        named["top_k"] = 0
    return SamplingParams(**named)


def requests_from(
    prompts: list[np.ndarray],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    keywords: Mapping[str, Any],
    return_routed_experts: bool,
    streams: bool = False,
    cache_salt: str = "",
) -> list[GenerationRequest]:
    """Pair prompts with their sampling: one mapping for all or one each, `keywords` on top."""
    single = sampling_params is None or isinstance(sampling_params, Mapping)
    each = [sampling_params or {}] * len(prompts) if single else list(sampling_params)
    if len(each) != len(prompts):
        raise RequestError(f"{len(each)} sampling_params for {len(prompts)} prompts", "sampling_params")
    sampling = [sampling_from({**params, **keywords}) for params in each]
    return [
        GenerationRequest(
            uuid.uuid4().hex,
            ids,
            params,
            return_routed_experts,
            cache_salt,
            incremental=streams or bool(params.stop),
        )
        for ids, params in zip(prompts, sampling, strict=True)
    ]
