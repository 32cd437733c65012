"""Conversion of a server's or an engine's answers to rollouts; inconsistent ones are refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayserve_moe.replay.encoding import decode_rollout, routing_until
from rayserve_moe.replay.encoding.description import described_layout
from rayserve_moe.replay.encoding.rollout import routing_of_rollout
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.requests.results import joined_routing
from rayserve_moe.rollouts.schema import Rollout


class Unavailable(Exception):
    """No answer, or the server is busy; a retry may succeed after `retry_after_s`.

    `status` is that of HTTP, if there is one; what `is_cut` may have been begun.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0, *, status: int = 0, is_cut: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s, self.status, self.is_cut = retry_after_s, status, is_cut


class Faulty(Exception):
    """A wrong answer, or a failure on this request; a retry may succeed, but not after many."""


class Refused(ValueError):
    """A request that no retry can answer; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Unusable(Exception):
    """No request will be answered: the server refuses the key, or engines do not start."""


@dataclass(frozen=True)
class SampleRequest:
    """Samples `first` to `first + count - 1` of a prompt, drawn under one seed of 32 bits: all of it, or some.

    `sampling` has SGLang's names, without `n` and seed. Routing comes from position `rows_from` on: in later turns of a
    conversation that is the number of tokens before it, less one.
    """

    prompt_id: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    seed: int
    first: int = 0
    count: int = 1
    returns_routing: bool = True
    rows_from: int = 0

    @property
    def all_sampling(self) -> dict[str, Any]:
        """`sampling` with what makes it these samples: `n`, the seed, and the first of them."""
        numbers = {"n": self.count, "sampling_seed": self.seed, "first_choice": self.first}
        return {**self.sampling, **numbers}


def rollouts_in(body: bytes, requests: Sequence[SampleRequest], *, started_at: float) -> list[list[Rollout]]:
    """Read the container that requests were answered with, all of them or none with routing.

    Returns the samples of each. Faulty where it is not what was asked for.
    """
    try:
        header, rows = decode_rollout(body)
        answers = header.get("answers", [header])
        ends = [*itertools.accumulate(request.count for request in requests)]
        if not isinstance(answers, list) or len(answers) != ends[-1]:
            raise ValueError("the answer has another number of samples than were asked for")
        if requests[0].returns_routing and len(rows) != len(answers):
            raise ValueError("the answer has not the rows of every sample")
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
    layout: RoutingLayout | None,
    started_at: float,
) -> Rollout:
    """One sample from its native answer and its routing from `rows_from` on; ValueError where they do not add up."""
    meta, version = answer["meta_info"], str(answer["meta_info"]["weight_version"])
    output_ids = np.asarray(answer["output_ids"], np.int32)
    logprobs = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    first, last = len(request.prompt_ids), len(request.prompt_ids) + len(output_ids)
    if len(logprobs) != len(output_ids) or not np.isfinite(logprobs).all():
        raise ValueError("there is not a finite log-prob per token")
    if meta["prompt_tokens"] != first:
        raise ValueError("it is the answer to another prompt")
    if routing is not None and len(output_ids) and routing.start + len(routing.rows) != last - 1:
        raise ValueError("there is not a row of routing per token but the last")
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
        layout=None if routing is None else layout,
        num_cached_tokens=int(meta["cached_tokens"]),
        started_at=started_at,
        elapsed_s=float(meta["e2e_latency"]),
    )


def _rollouts_of(
    answers: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], request: SampleRequest, *, started_at: float
) -> list[Rollout]:
    """The samples of one request, from their native answers and the rows that came with each."""
    routings, layout = _routings(answers, rows, request) if request.returns_routing else ([None] * len(answers), None)
    return [
        rollout_of(answer, request, index=index, routing=routing, layout=layout, started_at=started_at)
        for index, (answer, routing) in enumerate(zip(answers, routings, strict=True))
    ]


def _routings(
    answers: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], request: SampleRequest
) -> tuple[list[RoutedExperts | None], RoutingLayout | None]:
    """Rows of every sample from `rows_from` on; those of the prompt may be in one of them only."""
    descriptions = [answer["meta_info"]["routed_experts_info"] for answer in answers]
    layouts = [described_layout(description) for description in descriptions if description is not None]
    layout = layouts[0] if layouts else None
    routings = [
        None if description is None else routing_of_rollout(each, description, layout=layout)
        for each, description in zip(rows, descriptions, strict=True)
    ]
    return [_whole(routing, routings, request) for routing in routings], layout


def _whole(
    routing: RoutedExperts | None, others: Sequence[RoutedExperts | None], request: SampleRequest
) -> RoutedExperts | None:
    """Put the prompt's rows before those of a sample that came without.

    They are those of the first sample that has them all: where they differ between samples, as after a weight update,
    the server sends each sample its own.
    """
    start, prompt_len = request.rows_from, len(request.prompt_ids)
    if routing is None or routing.start == start:
        return routing
    known = (other for other in others if other is not None and other.start == start and not other.missing)
    first = next((other for other in known if start + len(other.rows) >= prompt_len), None)
    if first is None or routing.start != prompt_len:
        raise ValueError("the answer lacks rows of the prompt")
    return joined_routing(routing_until(first, prompt_len), routing)
