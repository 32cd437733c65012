"""Route `/v1/score`: probabilities of labels after texts (SGLang), or similarity of embeddings (vLLM)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests.columns import as_array
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.routes.embeddings import (
    check_shown,
    embedding_request,
    listed_answer,
    states_of,
    unit_vectors,
)
from rayserve_moe.serving.api.routes.request_parts import check_model, prompt_ids_of
from rayserve_moe.serving.api.schemas.prompt_types import Prompt
from rayserve_moe.serving.api.schemas.score import PAIRS, ScoreBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import GENERATION, takes

_PARAM_NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items"}
_ONE_TOKEN = SamplingParams(max_new_tokens=1, seed=0)
"""Sampling of a token whose value is unused: the scores are the model's own distribution."""


def score_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/v1/score", **takes(ScoreBody, *GENERATION, 501))
    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody, admission=state.admission)
        check_model(state, body.model)
        if body.pairs_name is not None:
            return json_answer(await _nearness(state, body, request))
        for name in ("query", "items", "label_token_ids"):
            if not getattr(body, name):
                raise ApiError(400, f"`{name}` is required, and not empty", param=name)
        prompts = await prompt_ids_of(state, body.prompts, param="items", request=request)
        stem = body.rid or uuid.uuid4().hex
        requests = [_request(body, prompt_ids, f"{stem}_{place}") for place, prompt_ids in enumerate(prompts)]
        streams = await open_streams(state, requests, param_names=_PARAM_NAMES)
        try:
            results = await while_connected(request.receive, streams.results())
        finally:
            streams.close()
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        temperature = body.temperature if body.apply_softmax else None
        scores = [_scores(result, temperature=temperature) for result in results]
        return json_answer({"object": "scoring", "scores": scores, "model": state.card.name, "usage": usage})

    return router


async def _nearness(state: ApiState, body: ScoreBody, request: Request) -> dict:
    """Return the cosine similarity of each pair of embeddings, in vLLM's form."""
    check_shown(state)
    names, texts = pair_of(body)
    ids = [
        await prompt_ids_of(state, each, param=name, request=request) for name, each in zip(names, texts, strict=True)
    ]
    stem = body.rid or f"score-{uuid.uuid4().hex}"
    asked = [embedding_request(each, f"{stem}_{i}", salt=body.cache_salt) for i, each in enumerate([*ids[0], *ids[1]])]
    vectors = unit_vectors(await states_of(state, request, asked=asked))
    scores = np.sum(vectors[: len(ids[0])] * vectors[len(ids[0]) :], axis=1)
    data = [{"index": i, "object": "score", "score": float(score)} for i, score in enumerate(scores)]
    return listed_answer(state, stem, data=data, num_tokens=sum(len(each.prompt_ids) for each in asked))


def pair_of(body: ScoreBody) -> tuple[tuple[str, str], tuple[list[Prompt], list[Prompt]]]:
    """Return the names and texts of the compared pairs.

    Raises: ApiError 400 if a field of the pair is missing, or if the numbers of texts differ.
    """
    given = {name for names in PAIRS for name in names if getattr(body, name) is not None}
    names = next((names for names in PAIRS if given == set(names)), None)
    if names is None or body.query is not None:
        pairs = ", ".join(" and ".join(f"`{name}`" for name in names) for names in PAIRS)
        raise ApiError(400, f"two texts are compared: {pairs}", param=body.pairs_name)
    first, second = (getattr(body, name) for name in names)
    if len(first) not in (1, len(second)):
        raise ApiError(400, f"`{names[0]}` should be one, or as many as `{names[1]}`", param=names[0])
    return names, (first, second)


def _request(body: ScoreBody, prompt_ids: np.ndarray, request_id: str) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        prompt_ids,
        _ONE_TOKEN,
        cache_salt=body.cache_salt,
        incremental=False,
        logprob_token_ids=body.label_token_ids,
        speculative=False,
    )


def _scores(result: ChoiceResult, *, temperature: float | None) -> Sequence[float]:
    """Return the probabilities of the labels in their order; with a temperature they are normalized over the labels."""
    listed = as_array(result.columns.get("listed_logprobs", np.zeros((0, 0))))
    if not len(listed):
        raise ApiError(503, "the request was ended before it was computed")
    logprobs = listed[0].astype(np.float64)
    if temperature is None:
        return np.exp(logprobs).tolist()
    chances = np.exp((logprobs - logprobs.max()) / temperature)
    return (chances / chances.sum()).tolist()
