"""Route `/audit`: claimed trajectories against the server's own routing and log-probs (`replay.audit`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.answers.native import prompt_column
from rayserve_moe.replay.audit import Claim, Scored, Tolerances, judge, needs_free_pass, worst
from rayserve_moe.replay.encoding import decode_each_forced, decode_each_forced_gates, decode_each_forced_index
from rayserve_moe.replay.encoding.wire_rows import to_base64
from rayserve_moe.replay.sketches import NUM_PROJECTIONS, SEED
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RoutedExperts, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.request_streams import RequestStreams, open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.schemas.audit import AuditBody, AuditSample
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import GENERATION, takes

MAX_SKETCH_BYTES = 64 << 20
_PASS_BYTES = 64 << 20
"""Maximum bytes of evidence of the samples that are computed at the same time; a single sample may exceed it."""
_NOT_AUDITED = "this server records no evidence for audits: start it with enable_audit: true"
_PASS_SAMPLES = 32
_PARAM_NAMES = {"prompt": "input_ids"}
_NO_TOKEN = SamplingParams(max_new_tokens=0, seed=0)


def audit_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/audit", **takes(AuditBody, *GENERATION, 501))
    async def audit(request: Request) -> Response:
        body = await read_body(request, AuditBody, admission=state.admission)
        if not state.card.evidence.audits:
            raise ApiError(501, _NOT_AUDITED, code="not_implemented")
        return json_answer(await while_connected(request.receive, _audited(state, body)))

    return router


async def _audited(state: ApiState, body: AuditBody) -> dict[str, Any]:
    version = state.card.weight_version
    for place, sample in enumerate(body.samples):
        if sample.weight_version not in (None, version):
            message = f"sample {place} claims another weight version than the served one, {version!r}"
            raise ApiError(409, message, param="samples", code="weight_version")
    if body.return_sketches and sum(map(partial(_sketch_bytes, state), body.samples)) > MAX_SKETCH_BYTES:
        message = f"`return_sketches`: sketches of these samples exceed {MAX_SKETCH_BYTES >> 20} MiB; send fewer"
        raise ApiError(400, message, param="return_sketches")
    entries: list[dict[str, Any]] = []
    for group in _groups(state, body.samples):
        entries += await _audited_group(state, group, first=len(entries), version=version, body=body)
    verdicts = [entry["verdict"] for entry in entries]
    return {
        "verdict": worst(verdicts),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)},
        "weight_version": version,
        "tie_tolerance": body.tie_tolerance,
        "logprob_tolerance": body.logprob_tolerance,
        "moe_layer_ids": list(state.card.routing.layer_ids),
        "samples": entries,
    }


async def _audited_group(
    state: ApiState, samples: Sequence[AuditSample], *, first: int, version: str, body: AuditBody
) -> list[dict[str, Any]]:
    """Compute the samples of a group at the same time, then those again that fail; return their entries.

    Raises: ApiError 409 if the weights have changed.
    """
    tolerances = Tolerances(tie=body.tie_tolerance, logprob=body.logprob_tolerance)
    in_thread = partial(asyncio.get_running_loop().run_in_executor, state.encoding)
    claims, rows = [], []
    for place, sample in enumerate(samples, first):
        with _named(place):
            claim, routing = await in_thread(_claim_of, sample, state.card)
        claims.append(claim)
        rows.append(routing)
    places = range(first, first + len(samples))
    forced = await _pass(state, [_request(claim, routing) for claim, routing in zip(claims, rows, strict=True)], places)
    failing = await in_thread(_failing, claims, forced, tolerances)
    again = await _pass(state, [_request(claims[index], None) for index in failing], [first + i for i in failing])
    if any(result.prompt is None or result.prompt.weight_version != version for result in (*forced, *again)):
        raise ApiError(409, "the weights changed during the audit: send it again", code="weight_version")
    free = dict(zip(failing, again, strict=True))

    def entries() -> list[dict[str, Any]]:
        return [
            _entry(claim, forced[index], free=free.get(index), card=state.card, tolerances=tolerances)
            | ({"sketches": _sketches(prompt_column(forced[index], "sketches")[1])} if body.return_sketches else {})
            for index, claim in enumerate(claims)
        ]

    return await in_thread(entries)


def _failing(claims: Sequence[Claim], forced: Sequence[ChoiceResult], tolerances: Tolerances) -> list[int]:
    """Return the indices of the claims that need a free pass."""
    pairs = enumerate(zip(claims, forced, strict=True))
    return [i for i, (claim, result) in pairs if needs_free_pass(claim, _scored(result), tolerances=tolerances)]


def _groups(state: ApiState, samples: Sequence[AuditSample]) -> Iterator[list[AuditSample]]:
    """Yield groups of consecutive samples with evidence within the memory limit, at least a sample each."""
    layout, group, num_bytes = state.card.routing, list[AuditSample](), 0
    for sample in samples:
        evidence = 8 * len(layout.layer_ids) * (1 + layout.top_k)
        own = len(sample.input_ids) * evidence + _sketch_bytes(state, sample)
        if group and (num_bytes + own > _PASS_BYTES or len(group) >= _PASS_SAMPLES):
            yield group
            group, num_bytes = [], 0
        group.append(sample)
        num_bytes += own
    yield group


def _sketch_bytes(state: ApiState, sample: AuditSample) -> int:
    return 4 * NUM_PROJECTIONS * (1 + state.card.routing.num_hidden_layers) * len(sample.input_ids)


def _claim_of(sample: AuditSample, card: ModelCard) -> tuple[Claim, RoutedExperts]:
    """Return a sample as a claim, and its rows with their index rows and gates. Raises: ValueError."""
    experts, lengths = sample.forced_routed_experts, [len(sample.input_ids)]
    with _named_field("forced_routed_experts"):
        routing = decode_each_forced(experts, card.routing, prompt_lens=lengths, is_batch=False)
    with _named_field("forced_router_gates"):
        routing = decode_each_forced_gates(sample.forced_router_gates, routing, is_batch=False)
    with _named_field("forced_indexer_topk"):
        (rows,) = decode_each_forced_index(sample.forced_indexer_topk, routing, layout=card.index, is_batch=False)
    if rows is None:
        raise ValueError("`forced_routed_experts` is required")
    if rows.start:
        raise ValueError("`forced_routed_experts` should begin at the first token")
    claim = Claim(
        np.asarray(sample.input_ids, np.int32),
        rows.rows,
        sample.prompt_len,
        logprobs=None if sample.logprobs is None else np.asarray(sample.logprobs),
        masks=sample.sampling_mask,
        has_gates=rows.gates is not None,
    )
    return claim, rows


def _request(claim: Claim, routing: RoutedExperts | None) -> GenerationRequest:
    return GenerationRequest(
        f"audit-{uuid.uuid4().hex}",
        claim.token_ids,
        _NO_TOKEN,
        forced_routing=routing,
        score_prompt_from=0,
        is_audited=True,
        incremental=False,
    )


async def _pass(state: ApiState, requests: Sequence[GenerationRequest], places: Iterable[int]) -> list[ChoiceResult]:
    """Compute the requests of the samples at `places` at the same time."""
    opened: list[tuple[int, RequestStreams]] = []
    try:
        for place, request in zip(places, requests, strict=True):
            with _named(place):
                opened.append((place, await open_streams(state, [request], param_names=_PARAM_NAMES)))
        return await asyncio.gather(*(_result(place, streams) for place, streams in opened))
    finally:
        for _, streams in opened:
            streams.close()


async def _result(place: int, streams: RequestStreams) -> ChoiceResult:
    with _named(place):
        (result,) = await streams.results()
    return result


def _scored(result: ChoiceResult) -> Scored:
    """Return the evidence of a pass. Raises: ApiError 503 if it was ended early."""
    names = ("native_experts", "expert_margins", "expert_ranks", "logprobs")
    scored = Scored(*(prompt_column(result, name)[1] for name in names))
    if not len(scored.native) or len(scored.logprobs) != len(scored.native) - 1:
        raise ApiError(503, "the audit was ended before it was computed")
    return scored


def _entry(
    claim: Claim, forced: ChoiceResult, *, free: ChoiceResult | None, card: ModelCard, tolerances: Tolerances
) -> dict[str, Any]:
    """Return the report about a claim as JSON: layers are hidden layers, and numbers that are not finite are null."""
    report = judge(
        claim,
        _scored(forced),
        free=None if free is None else _scored(free),
        num_experts=card.routing.num_experts,
        tolerances=tolerances,
    )
    entry, layer_ids = asdict(report), card.routing.layer_ids
    for name in ("first", "first_tie"):
        if (parting := entry[name]) is not None:
            entry[name] = {**parting, "layer": layer_ids[parting["layer"]], "margin": _finite(parting["margin"])}
    for name in ("max_logprob_difference", "k3"):
        entry[name] = _finite(entry[name])
    entry["places"] = [[token, layer_ids[layer]] for token, layer in report.places]
    return entry


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sketches(values: np.ndarray) -> dict[str, Any]:
    """Return sketches [T, layers + 1, P] as base64 of little-endian float32."""
    data = to_base64(values.astype("<f4"))
    return {"data": data, "shape": list(values.shape), "dtype": "float32", "seed": SEED}


@contextlib.contextmanager
def _named_field(name: str) -> Generator[None]:
    """Put the name of a sample's field before errors about its format."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


@contextlib.contextmanager
def _named(place: int) -> Generator[None]:
    """Name the sample in errors about it."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, f"`samples[{place}]`: {error}", param="samples") from error
    except ApiError as error:
        if error.status not in (400, 422):
            raise
        message = f"`samples[{place}]`: {error.message}"
        raise ApiError(error.status, message, param="samples", code=error.code) from error
