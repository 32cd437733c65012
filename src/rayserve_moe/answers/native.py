"""Answers in the native (SGLang) dialect, and values that all dialects derive from a result.

The HTTP routes and the in-process engine build their answers here, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rayserve_moe.replay.encoding import (
    encode_index,
    encode_routed_experts,
    gates,
    routed_experts_info,
    routing_from,
)
from rayserve_moe.replay.encoding.wire_rows import to_base64
from rayserve_moe.requests.columns import OUTPUT_COLUMNS, Columns, Ragged, Values, as_array, ragged
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, IndexLayout, ModelCard, RoutedExperts, RoutingLayout
from rayserve_moe.requests.results import ChoiceResult, DraftCounts, joined_ranges

NO_VALUES, NO_ENTRIES = np.zeros(0, np.float32), ragged([])
MASK_COUNTS, MASK_IDS = "sampling_mask_counts", "sampling_mask_ids"
"""Arrays of a container: the number of ids that each output could have had, and these ids, output after output."""


def native_answer(  # noqa: PLR0913 (keyword arguments that vary by call)
    request: GenerationRequest,
    result: ChoiceResult,
    *,
    card: ModelCard,
    e2e_latency_s: float,
    return_logprob: bool = False,
    token_text: Callable[[int], str] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
) -> dict:
    """Return the `/generate` object of a choice without routing; `finish_reason` is None while the choice runs.

    `token_text` returns the third member of log-prob entries; without it they are None. `arrays` are the arrays of a
    container and receive sampling masks.
    """
    versions = weight_version_ranges(request, result)
    meta_info = {
        "id": request.request_id,
        "finish_reason": _native_finish_reason(result),
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.num_cached_tokens,
        "e2e_latency": e2e_latency_s,
        "weight_version": _last_version(result, versions, otherwise=card.weight_version),
        "weight_versions": output_versions(request, result),
        "logprob_weight_versions": [list(labelled) for labelled in versions],
    }
    meta_info |= _native_drafts(result.drafts)
    meta_info |= _native_columns(request, result, arrays)
    if (states := hidden_states(request, result)) is not None:
        meta_info["hidden_states"] = states
    if request.return_layer_states:
        meta_info |= _layer_states(result, card)
    if return_logprob:
        meta_info |= _native_logprobs(request, result, token_text or _no_text)
    return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta_info}


def native_routing(request: GenerationRequest, result: ChoiceResult, *, card: ModelCard) -> dict:
    """Return the known routing of a choice in the sglang dialect, for its `meta_info`.

    A running choice has no routing unless it is streamed.
    """
    if not request.return_routed_experts or (result.finish is None and result.routing is None):
        return {}
    start = request.routed_experts_start
    wanted = None if result.routing is None else routing_from(result.routing, start)
    fields = {**routing_fields(wanted, card.routing), **gate_fields(request, wanted, card=card)}
    return {**fields, "routed_experts_start_len": start}


def gate_fields(
    request: GenerationRequest,
    routing: RoutedExperts | None,
    *,
    card: ModelCard,
    arrays: dict[str, np.ndarray] | None = None,
) -> dict:
    """Return `router_gates` and `router_gates_info` of rows, both None if no row is known; empty unless requested.

    `arrays` are the arrays of a container and receive the gates of known rows.
    """
    if not request.return_router_gates or card.gates is None:
        return {}
    if routing is None:
        return {"router_gates": None, "router_gates_info": None}
    described = {"router_gates_info": gates.describe(routing, layout=card.routing, scale=card.gates)}
    if arrays is None:
        return {"router_gates": gates.encode(routing), **described}
    arrays["router_gates"] = gates.known_gates(routing)
    return described


def index_fields(
    request: GenerationRequest, result: ChoiceResult, *, layout: IndexLayout | None, form: str = "sglang"
) -> dict:
    """Return the known index rows of a choice in a form of `replay.encoding.index`, and their description.

    The description has their shape, layers, checksum and missing ranges. A running choice has no rows unless they are
    streamed.
    """
    if not request.return_indexer_topk or layout is None or (result.finish is None and result.routing is None):
        return {}
    wanted = None if result.routing is None else routing_from(result.routing, request.routed_experts_start)
    if wanted is None or wanted.index is None:
        return {"indexer_topk": None, "indexer_topk_info": None}
    if result.finish is None and not len(wanted.rows):
        return {}
    rows, info = encode_index(wanted, layout, form=form)
    return {"indexer_topk": rows, "indexer_topk_info": info, "indexer_topk_num_layers": info["shape"][1]}


def weight_version_ranges(request: GenerationRequest, result: ChoiceResult) -> tuple[tuple[int, int, str], ...]:
    """Return the weights of a choice's log-probs: ranges `(from, to, version)` of positions, the prompt's first.

    They cover the scored prompt tokens and the outputs.
    """
    outputs = labelled_ranges(result.weight_versions, len(request.prompt_ids) + len(result.token_ids))
    start, logprobs = prompt_column(result, "logprobs")
    if result.prompt is None or not len(logprobs):
        return outputs
    scored = (start + 1, start + 1 + len(logprobs), result.prompt.weight_version)
    return joined_ranges((scored, *outputs))


def labelled_ranges(labels_from: tuple[tuple[int, str], ...], end: int) -> tuple[tuple[int, int, str], ...]:
    """Return ranges `(from, to, label)` up to position `end`, from pairs of a first position and a label."""
    ends = [min(position, end) for position, _ in labels_from[1:]] + [end]
    pairs = zip(labels_from, ends, strict=False)
    return tuple((first, last, label) for (first, label), last in pairs if first < last)


def output_versions(request: GenerationRequest, result: ChoiceResult) -> list[dict]:
    """Return the weights that sampled the outputs, in the form of SGLang and vLLM: spans of output tokens."""
    first, count = len(request.prompt_ids), len(result.token_ids)
    spans = labelled_ranges(result.weight_versions, first + count)
    return [{"version": version, "start": start - first, "end": end - first} for start, end, version in spans]


def stop_reason(
    result: ChoiceResult, request: GenerationRequest, *, eos_token_ids: tuple[int, ...]
) -> int | str | None:
    """Return vLLM's stop reason: the stop string or id; None also if the model's own end of sequence was sampled."""
    matched = None if result.finish is None else result.finish.matched
    is_end = eos_token_ids[:1] == (matched,) and not request.sampling.ignore_eos
    return None if is_end else matched


def error_of(finish: FinishReason | None) -> dict:
    """Return the error object of a choice that ended with an error of its request; empty otherwise."""
    if finish is None or finish.kind != "error":
        return {}
    return {"error": {"message": finish.message, "type": "invalid_request_error", "param": finish.source}}


class TokenLogprob(NamedTuple):
    """Token at a position with its log-prob."""

    token_id: int
    logprob: float
    rank: int | None
    """Rank among all tokens from 1, or None if unknown."""


def output_logprobs(result: ChoiceResult, *, num_top: int, listed_ids: Sequence[int] = ()) -> list[list[TokenLogprob]]:
    """Return per output the token itself, then the other `num_top` likeliest tokens, in vLLM's order.

    If the request lists ids, they replace the likeliest tokens.
    """
    own = map(TokenLogprob, result.token_ids, result.logprobs, result.ranks)
    if not listed_ids or "listed_logprobs" not in result.columns:
        return _with_likeliest(own, likeliest(result.columns), num_top)
    return [
        [token, *(TokenLogprob(i, value, None) for value, i in listed if i != token.token_id)]
        for token, listed in zip(own, _pairs(result.columns["listed_logprobs"], listed_ids), strict=True)
    ]


def prompt_column(result: ChoiceResult, name: str) -> tuple[int, np.ndarray]:
    """Return the first position and the values of a column of `PROBED_COLUMNS`; no values if there are none."""
    if result.prompt is None or name not in result.prompt.columns:
        return 0, NO_VALUES
    return result.prompt.starts[name], as_array(result.prompt.columns[name])


def _pairs(logprobs: Values, token_ids: Sequence[int]) -> list[list[tuple[float, int]]]:
    """Return pairs of log-prob and token id, in the order of the list, per position."""
    return [list(zip(values, token_ids, strict=True)) for values in as_array(logprobs).tolist()]


def _native_columns(request: GenerationRequest, result: ChoiceResult, arrays: dict[str, np.ndarray] | None) -> dict:
    """Return the requested columns that have a name of their own; masks in `arrays`, if given."""
    columns, written = result.columns, {}
    wanted = ((name, each) for name, each in OUTPUT_COLUMNS.items() if each.native and each.width(request) is not None)
    for name, each in wanted:
        values = columns.get(name, NO_ENTRIES if each.is_ragged else NO_VALUES)
        written |= column_fields(values, arrays, name=each.native)
    if request.return_sampling_mask:
        written["output_token_sampling_mask_length"] = len(columns.get("mask_ids", NO_ENTRIES))
    return written


def column_fields(values: Values, arrays: dict[str, np.ndarray] | None, *, name: str) -> dict:
    """Return a column as lists under `name`; sampling masks go to the container's `arrays`, if given."""
    if arrays is None or not isinstance(values, Ragged):
        return {name: values.tolist()}
    arrays |= {MASK_COUNTS: values.lengths, MASK_IDS: values.values}
    return {}


def hidden_states(request: GenerationRequest, result: ChoiceResult) -> list | None:
    """Return the hidden states of an ended choice as SGLang does, or None.

    The list has the prompt's states, then a state per output that the model has read. If the request wants only the
    last state, it is the state from which the last output was sampled.
    """
    start, states = prompt_column(result, "hidden")
    if not len(states):
        return None
    num_prompt, num_read = len(request.prompt_ids) - start, max(0, len(result.token_ids) - 1)
    if request.return_hidden_states == "last":
        return states[num_prompt + num_read - 1].tolist()
    return [states[:num_prompt].tolist(), *states[num_prompt : num_prompt + num_read].tolist()]


def _layer_states(result: ChoiceResult, card: ModelCard) -> dict:
    """Return the requested states of layers as base64 of little-endian float32 [tokens, layers, D]."""
    start, states = prompt_column(result, "layer_states")
    if not len(states):
        return {}
    data = to_base64(states.astype("<f4"))
    facts = {
        "shape": list(states.shape),
        "dtype": "float32",
        "start": start,
        "layers": list(card.evidence.state_layers),
    }
    return {"layer_states": {"data": data, **facts}}


def prompt_logprobs_of(
    result: ChoiceResult, prompt_ids: Sequence[int], *, num_top: int
) -> list[list[TokenLogprob] | None]:
    """Return log-probs per prompt token as `output_logprobs`; None for the first token and tokens not computed."""
    found: list[list[TokenLogprob] | None] = [None] * len(prompt_ids)
    start, logprobs = prompt_column(result, "logprobs")
    if result.prompt is not None and len(logprobs):
        first, last = start + 1, start + 1 + len(logprobs)
        own = map(TokenLogprob, prompt_ids[first:last], logprobs.tolist(), prompt_column(result, "ranks")[1].tolist())
        found[first:last] = _with_likeliest(own, likeliest(result.prompt.columns), num_top)
    return found


def _with_likeliest(
    own: Iterable[TokenLogprob], top: list[list[tuple[float, int]]] | None, num_top: int
) -> list[list[TokenLogprob]]:
    if top is None or not num_top:
        return [[token] for token in own]
    return [
        [
            token,
            *(TokenLogprob(i, value, rank) for rank, (value, i) in enumerate(best[:num_top], 1) if i != token.token_id),
        ]
        for token, best in zip(own, top, strict=True)
    ]


def likeliest(columns: Columns) -> list[list[tuple[float, int]]] | None:
    """Return pairs of log-prob and token id, likeliest first, per position; None without such columns."""
    if "top_ids" not in columns:
        return None
    ids, logprobs = (as_array(columns[name]).tolist() for name in ("top_ids", "top_logprobs"))
    return [list(zip(*pair, strict=True)) for pair in zip(logprobs, ids, strict=True)]


def routing_fields(routing: RoutedExperts | None, layout: RoutingLayout) -> dict:
    """Return `routed_experts` and `routed_experts_info` of rows; both None without routing."""
    if routing is None:
        return {"routed_experts": None, "routed_experts_info": None}
    return {
        "routed_experts": encode_routed_experts(routing, layout),
        "routed_experts_info": routed_experts_info(routing, layout),
    }


def _native_drafts(drafts: DraftCounts) -> dict:
    """Return the counts of drafts under SGLang's names; empty if none were verified.

    `spec_accept_length` is the mean number of tokens per verification.
    """
    if not drafts.chains:
        return {}
    return {
        "spec_verify_ct": drafts.chains,
        "spec_draft_token_num": drafts.drafted,
        "spec_accept_token_num": drafts.accepted,
        "spec_accept_rate": drafts.accepted / drafts.drafted,
        "spec_accept_length": 1 + drafts.accepted / drafts.chains,
    }


def _last_version(result: ChoiceResult, ranges: tuple[tuple[int, int, str], ...], *, otherwise: str) -> str:
    """Return the weights of the last log-prob or, without log-probs, those that the first would have."""
    if ranges:
        return ranges[-1][2]
    return result.weight_versions[-1][1] if result.weight_versions else otherwise


def _no_text(_: int) -> None:
    return None


def _native_logprobs(request: GenerationRequest, result: ChoiceResult, token_text: Callable[[int], str | None]) -> dict:
    """Return entries [log-prob, token id, text or None] of the output and, once they are known, of the prompt.

    Entries of the prompt, if requested, begin at `score_prompt_from`; the first entry has no log-prob.
    """
    entries = partial(_entries, token_text)
    fields: dict = {"output_token_logprobs": entries(zip(result.logprobs, result.token_ids, strict=True))}
    start = request.score_prompt_from
    of_prompt: Columns = {} if result.prompt is None else result.prompt.columns
    if start is None:
        fields["input_token_logprobs"] = []
    elif "logprobs" in of_prompt or result.finish is not None:
        known = prompt_column(result, "logprobs")[1].tolist()
        prompt_ids = request.prompt_ids[start:].tolist()
        fields["input_token_logprobs"] = entries(zip([None, *known], prompt_ids, strict=False))
    if request.num_top_logprobs:
        fields["output_top_logprobs"] = list(map(entries, likeliest(result.columns) or []))
    if request.num_top_logprobs and "input_token_logprobs" in fields:
        fields["input_top_logprobs"] = [] if start is None else [None, *map(entries, likeliest(of_prompt) or [])]
    if ids := request.logprob_token_ids:
        found = _pairs(result.columns.get("listed_logprobs", NO_VALUES), ids)
        fields |= {"output_token_ids_logprobs": list(map(entries, found))}
    if ids and "input_token_logprobs" in fields:
        found = _pairs(of_prompt.get("listed_logprobs", NO_VALUES), ids)
        fields["input_token_ids_logprobs"] = [] if start is None else [None, *map(entries, found)]
    return fields


def _entries(token_text: Callable[[int], str | None], pairs: Iterable[tuple[float | None, int]]) -> list[list]:
    return [[logprob, token_id, token_text(token_id)] for logprob, token_id in pairs]


def _native_finish_reason(result: ChoiceResult) -> dict | None:
    finish = result.finish
    if finish is None:
        return None
    reason: dict = {"type": finish.kind}
    if finish.kind == "length":
        reason["length"] = len(result.token_ids)
    if finish.matched is not None:
        reason["matched"] = finish.matched
    if finish.message is not None:
        reason["message"] = finish.message
    return reason
