"""Conversion of validated values under a dialect's names to a `GenerationRequest`; no other module builds requests.

Schemas validate HTTP bodies; `Engine`, `LLM` and rollout jobs validate theirs with `read_given`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from rayserve_moe.requests.constraints import ConstraintFields, constraint_of
from rayserve_moe.requests.fields import OPENAI, RAW, SGLANG, VLLM, RequestField, declared
from rayserve_moe.requests.records import (
    GenerationRequest,
    ListedInPrompt,
    ModelCard,
    RequestError,
    RoutedExperts,
    SamplingParams,
)

Given = Mapping[str, Any]

DEFAULT_NEW_TOKENS = {SGLANG: 128, OPENAI: 16, VLLM: 16}


def _by_name(record: Any) -> dict[str, list[RequestField]]:
    """Return fields of a record by every name in any dialect; two fields may share a name."""
    known: dict[str, list[RequestField]] = {}
    for field in declared(record):
        for name in {field.name, *field.names.values()}:
            known.setdefault(name, []).append(field)
    return known


_OPTIONS = _by_name(GenerationRequest)
_SAMPLING, _CONSTRAINTS = _by_name(SamplingParams), _by_name(ConstraintFields)


def read_given(given: Given, *, options: Set[str] = frozenset()) -> dict[str, Any]:
    """Return values in the engine's form, under their given names, without None.

    Raises: RequestError for a wrong value, and for a name that is neither a sampling parameter of any dialect nor in
    `options`.
    """
    read: dict[str, Any] = {}
    for name, value in given.items():
        fields = _OPTIONS.get(name) if name in options else _SAMPLING.get(name) or _CONSTRAINTS.get(name, [])
        if fields == []:
            known = ", ".join(sorted(_SAMPLING.keys() | _CONSTRAINTS.keys() | options))
            kind = "argument" if options else "sampling parameter"
            raise RequestError(f"unknown {kind} {name!r}; known: {known}", name)
        if value is not None:
            read[name] = _read(fields[0], value, name) if fields else value
    return read


def _read(field: RequestField, value: Any, name: str) -> Any:
    try:
        return field.values.read(value)
    except ValueError as error:
        raise RequestError(f"{name} {error}", name) from error


def _named(known: Mapping[str, list[RequestField]], given: Given) -> dict[str, Any]:
    """Return values under the record's own field names."""
    return {field.name: value for name, value in given.items() if value is not None for field in known.get(name, ())}


def build_request(
    prompt_ids: np.ndarray,
    given: Given,
    *,
    dialect: str,
    card: ModelCard,
    request_id: str | None = None,
    forced: RoutedExperts | None = None,
) -> GenerationRequest:
    """Build the request for a prompt from validated values; unknown names are ignored.

    The limit of new tokens defaults to the dialect's, capped at the remaining context. Routing is returned if it is
    streamed, and by default if the server captures it.

    Raises: RequestError for a first routing row after the end of the prompt.
    """
    num_left = max(1, card.max_model_len - len(prompt_ids))
    params = _named(_SAMPLING, given)
    params.setdefault("max_new_tokens", min(DEFAULT_NEW_TOKENS[dialect], num_left))
    sampling = SamplingParams(**params)
    options = _named(_OPTIONS, given)
    if options.get("routed_experts_start", 0) > len(prompt_ids):
        (field,) = _OPTIONS["routed_experts_start"]
        raise RequestError(f"{field.names[dialect]} must not exceed the number of prompt tokens", field.param)
    is_streamed = bool(given.get("stream"))
    options["stream_routed_experts"] = is_streamed and options.get("stream_routed_experts", False)
    options["return_routed_experts"] = (
        options.get("return_routed_experts", card.returns_routing) or options["stream_routed_experts"]
    )
    if dialect == SGLANG:  # SGLang admits higher values first
        options["priority"] = -options.get("priority", 0)
    options["num_top_logprobs"], scored_from = _SCORES[dialect](given, len(prompt_ids))
    waits = dialect == OPENAI and scored_from is not None
    if dialect != SGLANG and options.get("return_hidden_states"):  # other dialects return only the last state
        options["return_hidden_states"] = "last"
    restrictions = _named(_CONSTRAINTS, given)
    constraint = constraint_of(restrictions, longest=card.max_constraint_bytes) if restrictions else None
    options |= _evidence(given, options, dialect=dialect, card=card, differs=constraint or _is_processed(sampling))
    return GenerationRequest(
        request_id or uuid.uuid4().hex,
        prompt_ids,
        sampling,
        **options,
        incremental=(is_streamed and not waits) or sampling.is_watched,
        score_prompt_from=scored_from,
        listed_in_prompt=_listed_in_prompt(given, options, prompt_len=len(prompt_ids), scored_from=scored_from),
        constraint=constraint,
        forced_routing=forced,
    )


def _evidence(given: Given, options: Given, *, dialect: str, card: ModelCard, differs: object) -> dict[str, Any]:
    """Return the requested evidence, which accompanies log-probs; raw log-probs only if their distribution `differs`.

    Raises: RequestError for listed ids without log-probs, except in SGLang's dialect, which ignores them.
    """
    flag = given.get("return_logprob" if dialect == SGLANG else "logprobs")
    has_logprobs = flag is not None and flag is not False
    listed, mode = options.get("logprob_token_ids", ()), options.get("logprobs_mode") or card.logprobs_mode
    if listed and not has_logprobs and dialect != SGLANG:
        raise RequestError("is only for requests with `logprobs`", "logprob_token_ids")
    is_raw = bool(has_logprobs and mode == RAW and differs)
    return {"logprob_token_ids": listed if has_logprobs else (), "raw_logprobs": is_raw}


def _listed_in_prompt(
    given: Given, options: Given, *, prompt_len: int, scored_from: int | None
) -> ListedInPrompt | None:
    """Return vLLM's rows of ids, one per position from the first, or SGLang's list for all scored positions."""
    if (rows := given.get("prompt_logprob_token_ids")) is not None:
        return ListedInPrompt(given.get("prompt_logprob_start") or 0, rows)
    ids = given.get("token_ids_logprob")
    if not ids or scored_from is None or not options["logprob_token_ids"]:
        return None
    count = max(0, prompt_len - 1 - scored_from)  # a start beyond the prompt is rejected with the request
    return ListedInPrompt(scored_from, np.broadcast_to(np.asarray(ids, np.int32), (count, len(ids))))


def _is_processed(sampling: SamplingParams) -> bool:
    """Return True if logits are changed before sampling other than by truncation."""
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    listed = sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or sampling.processor_arguments
    return bool(listed or sampling.min_new_tokens) or penalties != (1, 0, 0) or sampling.temperature not in (0, 1)


def param_names(dialect: str, record: Any, *, prefix: str = "") -> dict[str, str]:
    """Return a dialect's names of a record's fields, by the names in the engine's errors."""
    return {f.param: prefix + f.names[dialect] for f in declared(record) if dialect in f.names}


def _sglang_scores(given: Given, prompt_len: int) -> tuple[int, int | None]:
    """Return the number of likeliest tokens and the start of prompt scoring; 0 and None without `return_logprob`."""
    if not given.get("return_logprob"):
        return 0, None
    first = given.get("logprob_start_len", -1)
    return given.get("top_logprobs_num", 0), None if first in (-1, prompt_len) else first


def _openai_scores(given: Given, prompt_len: int) -> tuple[int, int | None]:
    """Return the number of likeliest tokens and the start of prompt scoring.

    `logprobs` is a count in completions and enables `top_logprobs` in chats. `prompt_logprobs`, or `echo` with
    `logprobs`, scores the prompt.
    """
    logprobs, prompt = given.get("logprobs"), given.get("prompt_logprobs")
    scores_prompt = prompt is not None or (given.get("echo") and logprobs is not None)
    return max(given.get("top_logprobs", logprobs or 0), prompt or 0), 0 if scores_prompt else None


def _vllm_scores(given: Given, prompt_len: int) -> tuple[int, int | None]:
    """Return the number of likeliest tokens, common to prompt and output, and the start of prompt scoring."""
    prompt = given.get("prompt_logprobs")
    return max(given.get("logprobs") or 0, prompt or 0), None if prompt is None else 0


_SCORES = {SGLANG: _sglang_scores, OPENAI: _openai_scores, VLLM: _vllm_scores}
