"""Conversion of answers of a server or an engine to rollouts; inconsistent answers are rejected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.answers.native import MASK_COUNTS, MASK_IDS
from rayserve_moe.replay.encoding import decode_rollout, routing_until
from rayserve_moe.replay.encoding.description import described_layout
from rayserve_moe.replay.encoding.gates import scale_in
from rayserve_moe.replay.encoding.rollout import routing_of_rollout
from rayserve_moe.requests.columns import Ragged
from rayserve_moe.requests.records import GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.requests.results import joined_routing
from rayserve_moe.rollouts.alignment.answers import with_gates_of, with_index
from rayserve_moe.rollouts.schema import Rollout


class Unavailable(Exception):
    """The server gave no answer or is busy; a retry may succeed after `retry_after_s`.

    `status` is the HTTP status, or 0. With `is_cut` the server may have begun to answer.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0, *, status: int = 0, is_cut: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s, self.status, self.is_cut = retry_after_s, status, is_cut


class Faulty(Exception):
    """A wrong answer, or a failure on this request; a few retries may succeed."""


class Refused(ValueError):
    """A request that no retry can answer; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Unusable(Exception):
    """No request will be answered: the server rejects the key, or engines do not start."""


class Layouts(NamedTuple):
    """Layouts of the rows of samples; None for rows that they do not have."""

    routing: RoutingLayout | None = None
    index: IndexLayout | None = None
    gates: GateScale | None = None


@dataclass(frozen=True)
class SampleRequest:
    """Samples of a prompt, all of them or a range, drawn under the same seed."""

    prompt_id: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    """Sampling parameters in SGLang's names, without `n` and seed."""
    seed: int
    """32 bits."""
    first: int = 0
    """Index of the first sample."""
    count: int = 1
    """Number of samples."""
    returns_routing: bool = True
    returns_index: bool = False
    """Return index rows of sparse attention, beside routing."""
    returns_gates: bool = False
    """Return router gates, beside routing."""
    returns_mask: bool = False
    """Return the sampling mask of every output, and log-probs within it."""
    returns_drafts: bool = False
    """Return which outputs were accepted drafts."""
    rows_from: int = 0
    """First position of the routing; in later turns of a conversation the number of earlier tokens, minus 1."""

    @property
    def returned(self) -> dict[str, bool]:
        """Return the fields of a request that select returned parts."""
        return {
            "return_routed_experts": self.returns_routing,
            "return_indexer_topk": self.returns_index,
            "return_router_gates": self.returns_gates,
            "return_sampling_mask": self.returns_mask,
            "return_draft_tokens": self.returns_drafts,
        }

    @property
    def all_sampling(self) -> dict[str, Any]:
        """Return `sampling` with the fields that select these samples: `n`, the seed, and the first index."""
        numbers = {"n": self.count, "sampling_seed": self.seed, "first_choice": self.first}
        return {**self.sampling, **numbers}


def rollouts_in(body: bytes, requests: Sequence[SampleRequest], *, started_at: float) -> list[list[Rollout]]:
    """Read the container of an answer; return the samples of each request. All requests return routing, or none does.

    Raises Faulty if it does not match the requests.
    """
    try:
        header, rows = decode_rollout(body)
        answers = header.get("answers", [header])
        ends = [*itertools.accumulate(request.count for request in requests)]
        if not isinstance(answers, list) or len(answers) != ends[-1]:
            raise ValueError("the answer has another number of samples than requested")
        if requests[0].returns_routing and len(rows) != len(answers):
            raise ValueError("the answer does not have the rows of every sample")
        parts = [slice(last - request.count, last) for request, last in zip(requests, ends, strict=True)]
        return [
            _rollouts_of(answers[part], rows[part], request, started_at=started_at)
            for part, request in zip(parts, requests, strict=True)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Faulty(f"not an answer to this request: {error}") from error


def rollout_of(
    answer: Mapping[str, Any],
    request: SampleRequest,
    *,
    index: int,
    routing: RoutedExperts | None,
    layouts: Layouts,
    started_at: float,
) -> Rollout:
    """Build a sample from its native answer and its routing from `rows_from` on; `layouts` are of routing and index.

    Raises ValueError if they are inconsistent.
    """
    meta, version = answer["meta_info"], str(answer["meta_info"]["weight_version"])
    output_ids = np.asarray(answer["output_ids"], np.int32)
    logprobs = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    first, last = len(request.prompt_ids), len(request.prompt_ids) + len(output_ids)
    if len(logprobs) != len(output_ids) or not np.isfinite(logprobs).all():
        raise ValueError("not every token has a finite log-prob")
    if meta["prompt_tokens"] != first:
        raise ValueError("the answer belongs to another prompt")
    if routing is not None and len(output_ids) and routing.start + len(routing.rows) != last - 1:
        raise ValueError("not every token before the last has a row of routing")
    return Rollout(
        request.prompt_id,
        request.first + index,
        version,
        request.seed,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        output_ids=output_ids,
        logprobs=logprobs,
        logprob_versions=tuple((a, b, v) for a, b, v in meta.get("logprob_weight_versions", [(first, last, version)])),
        text=str(answer["text"]),
        finish_reason=str(meta["finish_reason"]["type"]),
        routing=routing,
        layout=None if routing is None else layouts.routing,
        index_layout=None if routing is None or routing.index is None else layouts.index,
        gate_scale=None if routing is None or routing.gates is None else layouts.gates,
        sampling_mask=_mask_of(answer, count=len(output_ids)),
        sampling_logprobs=_per_output(meta, "output_token_sampling_logprobs", np.float32, len(output_ids)),
        drafted=_per_output(meta, "output_token_drafted", np.bool_, len(output_ids)),
        num_cached_tokens=int(meta["cached_tokens"]),
        started_at=started_at,
        elapsed_s=float(meta["e2e_latency"]),
    )


def _mask_of(answer: Mapping[str, Any], *, count: int) -> Ragged | None:
    """Return the sampling masks in the arrays of a container, None without any. Raises ValueError if they differ."""
    lengths, ids = answer.get(MASK_COUNTS), answer.get(MASK_IDS)
    if lengths is None or ids is None:
        return None
    if lengths.shape != (count,) or (lengths < 1).any() or ids.shape != (int(lengths.sum()),):
        raise ValueError("not every token has a sampling mask")
    return Ragged(lengths, ids)


def _per_output(meta: Mapping[str, Any], name: str, dtype: type, count: int) -> np.ndarray | None:
    """Return a value per output token, None without any. Raises ValueError for another number of values."""
    if name not in meta:
        return None
    values = np.asarray(meta[name], dtype)
    if values.shape != (count,):
        raise ValueError(f"not every token has a value of {name}")
    return values


def _rollouts_of(
    answers: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], request: SampleRequest, *, started_at: float
) -> list[Rollout]:
    """Return the samples of a request, from their native answers and the rows of each."""
    routings, layout = _routings(answers, rows, request) if request.returns_routing else ([None] * len(answers), None)
    found = []
    for index, (answer, routing) in enumerate(zip(answers, routings, strict=True)):
        layouts = Layouts(layout)
        if routing is not None and request.returns_index:
            routing, index_layout = with_index(routing, answer)
            layouts = layouts._replace(index=index_layout)
        if routing is not None and routing.gates is not None:
            layouts = layouts._replace(gates=scale_in(answer["meta_info"]["router_gates_info"]))
        found.append(
            rollout_of(
                answer,
                request,
                index=index,
                routing=routing,
                layouts=layouts,
                started_at=started_at,
            )
        )
    return found


def _routings(
    answers: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], request: SampleRequest
) -> tuple[list[RoutedExperts | None], RoutingLayout | None]:
    """Return rows of every sample from `rows_from` on; the prompt's rows may be in a single sample only."""
    descriptions = [answer["meta_info"]["routed_experts_info"] for answer in answers]
    layouts = [described_layout(description) for description in descriptions if description is not None]
    layout = layouts[0] if layouts else None
    routings = [
        None if description is None else with_gates_of(routing_of_rollout(each, description, layout=layout), answer)[0]
        for each, description, answer in zip(rows, descriptions, answers, strict=True)
    ]
    return [_whole(routing, routings, request) for routing in routings], layout


def _whole(
    routing: RoutedExperts | None, others: Sequence[RoutedExperts | None], request: SampleRequest
) -> RoutedExperts | None:
    """Prepend the prompt's rows to a sample that came without them.

    They are taken from the first sample that has them all. If they differ between samples, as after a weight update,
    the server sends each sample its own.
    """
    start, prompt_len = request.rows_from, len(request.prompt_ids)
    if routing is None or routing.start == start:
        return routing
    known = (other for other in others if other is not None and other.start == start and not other.missing)
    first = next((other for other in known if start + len(other.rows) >= prompt_len), None)
    if first is None or routing.start != prompt_len:
        raise ValueError("the answer does not have all rows of the prompt")
    return joined_routing([routing_until(first, prompt_len), routing])
