"""Conversion of the arguments of `Engine` (SGLang's names) and `LLM` (vLLM's names) to generation requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.replay.encoding import (
    INDEX_FORMS,
    decode_each_forced,
    decode_each_forced_gates,
    decode_each_forced_index,
)
from rayserve_moe.requests.builder import build_request, param_names, read_given
from rayserve_moe.requests.fields import FLAG, INT32_MAX, SGLANG, VLLM, Values, one_of, whole
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError, SharedSampling
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.truncation import truncation_to

FORCED, FORCED_INDEX, FORCED_GATES = "forced_routed_experts", "forced_indexer_topk", "forced_router_gates"
INDEX_FORM, ADAPTER = "indexer_topk_format", "lora_path"
_OPTIONS_WITHOUT_FIELD = {
    "return_logprob": FLAG,
    "logprob_start_len": whole(-1, INT32_MAX),
    INDEX_FORM: one_of(*INDEX_FORMS),
}
"""Keywords that no field of a request holds unchanged."""
OPTIONS = {
    *_OPTIONS_WITHOUT_FIELD,
    "rid",
    FORCED,
    FORCED_INDEX,
    FORCED_GATES,
    *param_names(SGLANG, GenerationRequest).values(),
}
"""Keywords of a call of `Engine` besides sampling parameters."""
_SCORES = ("logprobs", "prompt_logprobs")
_OPTIONS_OF_LLM = {
    *_SCORES,
    "logprob_token_ids",
    "thinking_token_budget",
    *param_names(VLLM, GenerationRequest).values(),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SharedSampling):
    """Sampling of the answer to a prompt, and the data returned with it."""

    max_tokens: int | None = 16
    """0 runs the prompt only, None continues to the end of the context."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    repetition_detection: Mapping[str, int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None
    min_tokens: int = 0
    """The answer does not end within these first tokens."""
    logprobs: int | None = None
    """k returns the log-prob of every output token, and of the k likeliest tokens or of `logprob_token_ids`."""
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: str | None = None
    thinking_token_budget: int | None = None
    prompt_logprobs: int | None = None
    """The same as `logprobs`, for the tokens of the prompt."""
    truncate_prompt_tokens: int | None = None
    """k keeps the last k tokens of the prompt, -1 the maximum that allows an output token, None all."""
    routed_experts_prompt_start: int = 0
    """Routing rows before this position are left out."""


class Prompts(NamedTuple):
    """The prompts of a call."""

    ids: list[np.ndarray]
    """int32 [prompt_len] per prompt."""
    is_batch: bool
    """True if the call has a batch of prompts."""


def prompts_from(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | None, *, input_ids: Sequence[Any] | None
) -> Prompts:
    """Return the prompts of a call.

    Raises: RequestError unless exactly one of text and ids is given, or if ids are invalid.
    """
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
    """Return the only prompt.

    Raises: RequestError for a batch, even with a single prompt.
    """
    prompts = prompts_from(tokenizer, prompt, input_ids=input_ids)
    if prompts.is_batch:
        raise RequestError("one prompt at a time here; generate takes batches", "prompt")
    return prompts


def token_ids_of(values: Any) -> np.ndarray:
    """Return a prompt's ids as int32 [prompt_len].

    Raises: RequestError unless they are a list of integers from 0 to the maximum of int32.
    """
    try:
        ids = np.asarray(values)
    except ValueError as error:
        raise RequestError("input_ids must be one list of token ids per prompt", "input_ids") from error
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise RequestError("input_ids must be one list of token ids per prompt", "input_ids")
    return ids.astype(np.int32)


def requests_from(
    prompts: Prompts,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    keywords: Mapping[str, Any],
    card: ModelCard,
    streams: bool = False,
) -> list[GenerationRequest]:
    """Build a request per prompt from its sampling parameters (a mapping for all or one each) and from `keywords`.

    `keywords` take precedence and include options. `logprob_start_len` p returns log-probs of prompt tokens at
    positions above p, -1 none. `forced_routed_experts` replaces the router's selection at prompt positions from 0: an
    array [rows, MoE layers, k] or any encoding of an answer; for a batch a list with an entry per prompt.
    `forced_indexer_topk` and `forced_router_gates` likewise replace the choice of indexes and the experts' weights at
    the same positions. `indexer_topk_format` is the form of index rows in the answer. `lora_path` is the name of an
    adapter, or a list with a name or None per prompt.
    """
    each = one_each(sampling_params, len(prompts.ids), single=Mapping, otherwise={})
    lengths = list(map(len, prompts.ids))
    try:
        forced = decode_each_forced(keywords.get(FORCED), card.routing, prompt_lens=lengths, is_batch=prompts.is_batch)
    except ValueError as error:
        raise RequestError(f"{FORCED}: {error}", FORCED) from error
    try:
        index = keywords.get(FORCED_INDEX)
        forced = decode_each_forced_index(index, forced, layout=card.index, is_batch=prompts.is_batch)
    except ValueError as error:
        raise RequestError(f"{FORCED_INDEX}: {error}", FORCED_INDEX) from error
    try:
        forced = decode_each_forced_gates(keywords.get(FORCED_GATES), forced, is_batch=prompts.is_batch)
    except ValueError as error:
        raise RequestError(f"{FORCED_GATES}: {error}", FORCED_GATES) from error
    adapters = _each_adapter(keywords.get(ADAPTER), len(prompts.ids))
    given = read_given({name: value for name, value in keywords.items() if name != ADAPTER}, options=OPTIONS)
    for name, values in _OPTIONS_WITHOUT_FIELD.items():
        if name in given:
            given[name] = _read(values, given[name], name)
    on_top = {"return_routed_experts": False, **given, "stream": streams}
    return [
        build_request(
            ids,
            read_given(params) | on_top | read_given({ADAPTER: adapter}, options=OPTIONS),
            dialect=SGLANG,
            card=card,
            request_id=rid,
            forced=rows,
        )
        for ids, params, rows, rid, adapter in zip(
            prompts.ids, each, forced, _rids(keywords.get("rid"), prompts), adapters, strict=True
        )
    ]


def _read(values: Values, given: Any, name: str) -> Any:
    """Return the validated value of a keyword.

    Raises: RequestError that names the keyword, for a wrong value.
    """
    try:
        return values.read(given)
    except ValueError as error:
        raise RequestError(f"{name} {error}", name) from error


def _rids(rid: str | Sequence[str] | None, prompts: Prompts) -> list[str | None]:
    """Return the request ids as `/generate` names them: an id per prompt; a single id gets numbers in a batch."""
    if rid is None or isinstance(rid, str):
        is_stem = rid is not None and prompts.is_batch
        return [f"{rid}_{place}" if is_stem else rid for place in range(len(prompts.ids))]
    return one_each(rid, len(prompts.ids), single=str, otherwise=None)


def _each_adapter(given: Any, count: int) -> list[Any]:
    """Return the adapter of each prompt. Raises: RequestError for a list of another length."""
    each = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(each) != count:
        raise RequestError(f"{len(each)} adapters for {count} prompts", ADAPTER)
    return each


def request_with(
    prompt_ids: np.ndarray, params: SamplingParams, *, card: ModelCard, options: Mapping[str, Any]
) -> GenerationRequest:
    """Return the request for a prompt of `LLM`, with routing if the engine captures it."""
    named = {**asdict(params), **options}
    keeps = max(1, card.max_model_len - (params.max_tokens != 0))
    num_tokens = named.pop("truncate_prompt_tokens")
    truncation = truncation_to(num_tokens, max_model_len=card.max_model_len, keeps=keeps, keeps_end=True)
    if truncation is not None:
        prompt_ids = truncation.cut(prompt_ids)
    given = read_given(named, options=_OPTIONS_OF_LLM)
    for name in _SCORES:
        if given.get(name, 0) < 0:
            raise RequestError(f"{name} must be None or at least 0: all of the vocabulary is never returned", name)
    given.setdefault("max_tokens", card.max_model_len - len(prompt_ids))
    return build_request(prompt_ids, given, dialect=VLLM, card=card)


def one_each(given: Any, count: int, *, single: type, otherwise: Any) -> list[Any]:
    """Return `count` parameters from a list, or from a single parameter of type `single` for all prompts."""
    each = (
        [otherwise if given is None else given] * count if given is None or isinstance(given, single) else list(given)
    )
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling_params for {count} prompts", "sampling_params")
    return each
