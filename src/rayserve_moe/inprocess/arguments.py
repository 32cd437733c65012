"""From the arguments of `Engine.generate` and its siblings to generation requests."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.engine.answers import first_scored
from rayserve_moe.replay.encoding import decode_forced
from rayserve_moe.requests import GenerationRequest, RequestError, RoutedExperts, RoutingLayout, SamplingParams
from rayserve_moe.text.tokenizer import Tokenizer

RENAMED = {"max_tokens": "max_new_tokens", "sampling_seed": "seed"}
SEQUENCES = ("stop", "stop_token_ids")
FORCED = "forced_routed_experts"


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for besides sampling, under SGLang's names: the same for all ways to generate.

    `logprob_start_len` p gives log-probs of the prompt tokens at positions above p, -1 none; `top_logprobs_num` the
    likeliest tokens beside every log-prob. Routing rows before position `routed_experts_start_len` are left out, and
    `stream_routed_experts` sends each with its token. `forced_routed_experts` replaces what the router would select at
    the prompt positions it has rows for: an array [rows, MoE layers, k] from position 0, or any encoding that an answer
    can have; one per prompt of a batch. Only calls with the same `cache_salt` share cached prefixes.
    """

    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream_routed_experts: bool = False
    forced_routed_experts: Any = None
    cache_salt: str = ""


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(Options))


class Prompts(NamedTuple):
    """The prompts of a call as int32 ids, and whether they came as a batch."""

    ids: list[np.ndarray]
    is_batch: bool


def options_and_sampling(keywords: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Tell the keywords of a call apart: its options, and sampling parameters for all of its prompts."""
    options = {name: value for name, value in keywords.items() if name in OPTION_NAMES}
    return Options(**options), {name: value for name, value in keywords.items() if name not in OPTION_NAMES}


def prompts_from(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | None, *, input_ids: Sequence[Any] | None
) -> Prompts:
    """Read the prompts of a call. Exactly one of text and ids must be given."""
    if prompt is not None and input_ids is None:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [tokenizer.encode(text) for text in texts]
        is_batch = not isinstance(prompt, str)
    elif input_ids is not None and prompt is None:
        is_batch = len(input_ids) > 0 and not np.isscalar(input_ids[0])
        ids = list(input_ids) if is_batch else [input_ids]
    else:
        raise RequestError("give either prompt (text) or input_ids", "prompt")
    return Prompts([token_ids_of(one) for one in ids], is_batch)


def single_prompt_from(tokenizer: Tokenizer, prompt: str | None, *, input_ids: Sequence[int] | None) -> Prompts:
    """Read the only prompt; RequestError for a batch, of which all but one would be lost."""
    prompts = prompts_from(tokenizer, prompt, input_ids=input_ids)
    if prompts.is_batch:
        raise RequestError("one prompt at a time here; generate takes batches", "prompt")
    return prompts


def token_ids_of(values: Any) -> np.ndarray:
    """Take over one prompt's ids as int32 [prompt_len]; RequestError unless they are integers that fit."""
    try:
        ids = np.asarray(values)
    except ValueError as error:
        raise RequestError("input_ids must be one list of token ids per prompt", "input_ids") from error
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise RequestError("input_ids must be one list of token ids per prompt", "input_ids")
    return ids.astype(np.int32)


def sampling_from(values: Mapping[str, Any]) -> SamplingParams:
    """Build SamplingParams from SGLang's names; RequestError names an unknown one.

    vLLM's `min_tokens` holds back stop strings too, unlike `min_new_tokens`.
    """
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    named = {RENAMED.get(key, key): value for key, value in values.items()}
    if "min_tokens" in named:
        named["min_new_tokens"] = named["stop_strings_after"] = named.pop("min_tokens")
    if unknown := sorted(set(named) - known):
        raise RequestError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])
    for key in SEQUENCES:
        if key in named:
            value = named[key]
            named[key] = () if value is None else (value,) if isinstance(value, str | int) else tuple(value)
    if named.get("top_k", 0) == -1:
        named["top_k"] = 0
    if isinstance(bias := named.get("logit_bias"), Mapping):
        named["logit_bias"] = tuple(sorted((int(token_id), float(value)) for token_id, value in bias.items()))
    return SamplingParams(**named)


def requests_from(
    prompts: Prompts,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    keywords: Mapping[str, Any],
    options: Options,
    layout: RoutingLayout,
    streams: bool = False,
) -> list[GenerationRequest]:
    """Pair prompts with their sampling: one mapping for all or one each, `keywords` on top."""
    count = len(prompts.ids)
    single = sampling_params is None or isinstance(sampling_params, Mapping)
    each = [sampling_params or {}] * count if single else list(sampling_params)
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling_params for {count} prompts", "sampling_params")
    if not 0 <= options.routed_experts_start_len <= min(map(len, prompts.ids), default=0):
        raise RequestError(
            "routed_experts_start_len must lie between 0 and the number of prompt tokens", "routed_experts_start_len"
        )
    forced = _forced_of(options.forced_routed_experts, prompts, layout)
    return [
        GenerationRequest(
            uuid.uuid4().hex,
            ids,
            sampling := sampling_from({**params, **keywords}),
            options.return_routed_experts,
            options.cache_salt,
            incremental=streams or bool(sampling.stop),
            num_top_logprobs=options.top_logprobs_num,
            score_prompt_from=first_scored(options.logprob_start_len, len(ids)),
            forced_routing=rows,
            stream_routed_experts=streams and options.stream_routed_experts,
            routed_experts_start=options.routed_experts_start_len,
        )
        for ids, params, rows in zip(prompts.ids, each, forced, strict=True)
    ]


def _forced_of(given: Any, prompts: Prompts, layout: RoutingLayout) -> list[RoutedExperts | None]:
    """Read the forced routing of every prompt: a batch has a list with one entry, or None, per prompt."""
    if given is None:
        return [None] * len(prompts.ids)
    each = given if prompts.is_batch else [given]
    if not isinstance(each, list | tuple) or len(each) != len(prompts.ids):
        raise RequestError("forced_routed_experts: a batch needs a list with one entry per prompt", FORCED)
    return [None if one is None else _forced(one, layout, len(ids)) for one, ids in zip(each, prompts.ids, strict=True)]


def _forced(value: Any, layout: RoutingLayout, prompt_len: int) -> RoutedExperts:
    """Take over the forced routing of one prompt. That it suits the prompt is checked at admission."""
    if isinstance(value, RoutedExperts):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or (value.size and not 0 <= value.min() <= value.max() < layout.num_experts):
            raise RequestError("forced_routed_experts: ids must be integers below the number of experts", FORCED)
        return RoutedExperts(value.astype(layout.dtype))
    try:
        return decode_forced(value, layout, prompt_len=prompt_len)
    except ValueError as error:
        raise RequestError(str(error), FORCED) from error
