"""The results of a request in the native (SGLang) dialect, and what all dialects derive from a result.

Both the HTTP routes and the in-process engine build their answers here, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rayserve_moe.replay.encoding import encode_routed_experts, routed_experts_info, routing_from
from rayserve_moe.requests.records import (
    ChoiceResult,
    DraftCounts,
    FinishReason,
    GenerationRequest,
    ModelCard,
    PromptScores,
    RoutedExperts,
    RoutingLayout,
    TopLogprobs,
    joined_ranges,
)


def native_answer(
    request: GenerationRequest,
    result: ChoiceResult,
    *,
    card: ModelCard,
    e2e_latency_s: float,
    return_logprob: bool = False,
    token_text: Callable[[int], str] | None = None,
) -> dict:
    """Return the `/generate` object of one choice without routing; while it runs, `finish_reason` is None.

    `token_text` gives the third member of the entries of log-probs, None without it.
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
    if request.return_entropy and result.evidence is not None:
        meta_info["output_token_entropy"] = result.evidence[:, 0].tolist()
    if request.return_sampling_mask:
        meta_info |= _native_support(result.support)
    if (states := hidden_states(request, result)) is not None:
        meta_info["hidden_states"] = states
    if return_logprob:
        meta_info |= _native_logprobs(request, result, token_text or _no_text)
    return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta_info}


def native_routing(request: GenerationRequest, result: ChoiceResult, *, layout: RoutingLayout) -> dict:
    """Return the routing of one choice in the sglang dialect for its `meta_info`, so far as it is known.

    While the choice runs there is none, unless it is streamed.
    """
    if not request.return_routed_experts or (result.finish is None and result.routing is None):
        return {}
    start = request.routed_experts_start
    return {**routing_fields(result.routing, layout, start=start), "routed_experts_start_len": start}


def weight_version_ranges(request: GenerationRequest, result: ChoiceResult) -> tuple[tuple[int, int, str], ...]:
    """Which weights the log-probs of a choice are of: ranges `(from, to, version)` of positions, the prompt's first.

    They cover the outputs, and before them those prompt tokens that were scored.
    """
    scores = result.prompt_scores
    outputs = labelled_ranges(result.weight_versions, len(request.prompt_ids) + len(result.token_ids))
    if scores is None or not len(scores.logprobs):
        return outputs
    scored = (scores.start + 1, scores.start + 1 + len(scores.logprobs), scores.weight_version)
    return joined_ranges((scored, *outputs))


def labelled_ranges(labels_from: tuple[tuple[int, str], ...], end: int) -> tuple[tuple[int, int, str], ...]:
    """Ranges `(from, to, label)` from pairs of a position and the label from there on, up to position `end`."""
    ends = [min(position, end) for position, _ in labels_from[1:]] + [end]
    pairs = zip(labels_from, ends, strict=False)
    return tuple((first, last, label) for (first, label), last in pairs if first < last)


def output_versions(request: GenerationRequest, result: ChoiceResult) -> list[dict]:
    """Which weights the outputs were sampled under, in the form of SGLang and vLLM: spans of output tokens."""
    first, count = len(request.prompt_ids), len(result.token_ids)
    spans = labelled_ranges(result.weight_versions, first + count)
    return [{"version": version, "start": start - first, "end": end - first} for start, end, version in spans]


def stop_reason(
    result: ChoiceResult, request: GenerationRequest, *, eos_token_ids: tuple[int, ...]
) -> int | str | None:
    """vLLM's: the stop string or token id that ended a choice; None also where the model's own end of sequence did."""
    matched = None if result.finish is None else result.finish.matched
    is_end = eos_token_ids[:1] == (matched,) and not request.sampling.ignore_eos
    return None if is_end else matched


def error_of(finish: FinishReason | None) -> dict:
    """What a choice says that ended with an error of its request: the fields of an error object."""
    if finish is None or finish.kind != "error":
        return {}
    return {"error": {"message": finish.message, "type": "invalid_request_error", "param": finish.source}}


class TokenLogprob(NamedTuple):
    """A token at one position, with its log-prob and its place among all tokens there, from 1 on, where it is known."""

    token_id: int
    logprob: float
    rank: int | None


def output_logprobs(result: ChoiceResult, *, num_top: int, listed_ids: Sequence[int] = ()) -> list[list[TokenLogprob]]:
    """Per output the token itself, then the `num_top` likeliest besides it, in vLLM's order: so many or one more.

    Where a request lists ids, those come in their place.
    """
    own = map(TokenLogprob, result.token_ids, result.logprobs, result.ranks)
    if not listed_ids or result.evidence is None:
        return _with_likeliest(own, result.top, num_top)
    return [
        [token, *(TokenLogprob(i, value, None) for value, i in listed if i != token.token_id)]
        for token, listed in zip(own, _listed(result.evidence, listed_ids), strict=True)
    ]


def _listed(evidence: np.ndarray, listed_ids: Sequence[int]) -> list[list[tuple[float, int]]]:
    """Pairs of log-prob and token id, in the order of the list, per output."""
    return _pairs(evidence[:, 1:], listed_ids)


def _pairs(logprobs: np.ndarray, token_ids: Sequence[int]) -> list[list[tuple[float, int]]]:
    return [list(zip(values, token_ids, strict=True)) for values in logprobs.tolist()]


def _native_support(support: list[tuple[np.ndarray, float]]) -> dict:
    return {
        "output_token_sampling_mask": [ids.tolist() for ids, _ in support],
        "output_token_sampling_logprobs": [logprob for _, logprob in support],
        "output_token_sampling_mask_length": len(support),
    }


def hidden_states(request: GenerationRequest, result: ChoiceResult) -> list | None:
    """The hidden states of a choice that has ended, as SGLang has them: those of the prompt, then one per output that
    was read; the last one alone where that is asked for. None where there are none, or none are wanted."""
    hidden = result.hidden
    if hidden is None or not request.return_hidden_states:
        return None
    if request.return_hidden_states == "last":
        return hidden.last(len(result.token_ids)).tolist()
    return [hidden.prompt.tolist(), *hidden.outputs[: max(0, len(result.token_ids) - 1)].tolist()]


def prompt_logprobs_of(
    scores: PromptScores | None, prompt_ids: Sequence[int], *, num_top: int
) -> list[list[TokenLogprob] | None]:
    """The same per prompt token; None for the first, which nothing precedes, and for those that were not computed."""
    found: list[list[TokenLogprob] | None] = [None] * len(prompt_ids)
    if scores is not None:
        first, last = scores.start + 1, scores.start + 1 + len(scores.logprobs)
        own = map(TokenLogprob, prompt_ids[first:last], scores.logprobs.tolist(), scores.ranks.tolist())
        found[first:last] = _with_likeliest(own, scores.top, num_top)
    return found


def _with_likeliest(own: Iterable[TokenLogprob], top: TopLogprobs | None, num_top: int) -> list[list[TokenLogprob]]:
    if top is None or not num_top:
        return [[token] for token in own]
    return [
        [
            token,
            *(TokenLogprob(i, value, rank) for rank, (value, i) in enumerate(best[:num_top], 1) if i != token.token_id),
        ]
        for token, best in zip(own, likeliest(top), strict=True)
    ]


def likeliest(top: TopLogprobs) -> list[list[tuple[float, int]]]:
    """Pairs of log-prob and token id, likeliest first, per position."""
    return [
        list(zip(logprobs, token_ids, strict=True))
        for logprobs, token_ids in zip(top.logprobs.tolist(), top.token_ids.tolist(), strict=True)
    ]


def routing_fields(routing: RoutedExperts | None, layout: RoutingLayout, *, start: int = 0) -> dict:
    """Return `routed_experts` and `routed_experts_info` for the rows from `start`; both None where nothing is known."""
    if routing is None:
        return {"routed_experts": None, "routed_experts_info": None}
    wanted = routing_from(routing, start)
    return {
        "routed_experts": encode_routed_experts(wanted, layout),
        "routed_experts_info": routed_experts_info(wanted, layout),
    }


def _native_drafts(drafts: DraftCounts) -> dict:
    """What became of drafts, under SGLang's names; nothing where none were verified.

    `spec_accept_length` is how many tokens a verification gave on average.
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
    """The weights of the last log-prob, or, while there is none, those that the first one would be of."""
    if ranges:
        return ranges[-1][2]
    return result.weight_versions[-1][1] if result.weight_versions else otherwise


def _no_text(_: int) -> None:
    return None


def _native_logprobs(request: GenerationRequest, result: ChoiceResult, token_text: Callable[[int], str | None]) -> dict:
    """Entries [log-prob, token id, text or None] of the output, and of the prompt once they are known.

    Those of the prompt begin at `score_prompt_from`, if any are asked for; nothing comes before the first one, so that
    it has no log-prob.
    """
    entries = partial(_entries, token_text)
    fields: dict = {"output_token_logprobs": entries(zip(result.logprobs, result.token_ids, strict=True))}
    scores, start = result.prompt_scores, request.score_prompt_from
    if start is None:
        fields["input_token_logprobs"] = []
    elif scores is not None or result.finish is not None:
        known = [] if scores is None else scores.logprobs.tolist()
        prompt_ids = request.prompt_ids[start:].tolist()
        fields["input_token_logprobs"] = entries(zip([None, *known], prompt_ids, strict=False))
    if request.num_top_logprobs:
        fields["output_top_logprobs"] = [] if result.top is None else list(map(entries, likeliest(result.top)))
    if request.num_top_logprobs and "input_token_logprobs" in fields:
        tops = [] if scores is None or scores.top is None else likeliest(scores.top)
        fields["input_top_logprobs"] = [] if start is None else [None, *map(entries, tops)]
    if ids := request.logprob_token_ids:
        found = [] if result.evidence is None else _listed(result.evidence, ids)
        fields |= {"output_token_ids_logprobs": list(map(entries, found))}
    if ids and "input_token_logprobs" in fields:
        found = [] if result.prompt_listed is None else _pairs(result.prompt_listed, ids)
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
