"""Routes `/v1/embeddings` and `/v1/score`.

Embeddings are hidden states at last tokens. Scores are probabilities of labels (SGLang) or similarities of embeddings
(vLLM).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pybase64
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.answers.native import prompt_column
from rayserve_moe.requests.columns import as_array
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.routes.request_parts import adapter_for, checked_truncation, prompt_ids_of
from rayserve_moe.serving.api.schemas.prompt_types import Prompt
from rayserve_moe.serving.api.schemas.scoring import PAIRS, EmbeddingBody, ScoreBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import GENERATION, takes

_NO_TOKEN = SamplingParams(max_new_tokens=0, seed=0)
_NOT_SHOWN = (
    "hidden states stay on the devices of this server, and embeddings are such: start it with "
    "enable_return_hidden_states: true"
)
_PARAM_NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items"}
_ONE_TOKEN = SamplingParams(max_new_tokens=1, seed=0)
"""Sampling of a token whose value is unused: the scores are the model's own distribution."""


def scoring_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.post("/v1/embeddings", **takes(EmbeddingBody, *GENERATION, 501))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingBody, admission=state.admission)
        adapter = adapter_for(state, body.model)
        _check_shown(state)
        if body.dimensions not in (None, state.card.hidden_size):
            message = f"`dimensions` should be {state.card.hidden_size}: no model here was trained for shorter vectors"
            raise ApiError(400, message, param="dimensions")
        cut, longest = body.truncate_prompt_tokens, state.card.max_model_len
        truncation = checked_truncation(state, cut, side=body.truncation_side, keeps=longest)
        prompts = await prompt_ids_of(
            state,
            body.input,
            param="input",
            request=request,
            add_special_tokens=body.add_special_tokens,
            truncation=truncation,
        )
        answer_id = body.rid or f"embd-{uuid.uuid4().hex}"
        asked = [_embedding_request(ids, f"{answer_id}_{i}", salt=body.cache_salt) for i, ids in enumerate(prompts)]
        asked = [replace(each, priority=body.priority, adapter=adapter) for each in asked]
        vectors = await _states_of(state, request, asked=asked)
        vectors = _unit_vectors(vectors) if body.use_activation else vectors
        embedded = [_encoded(vector, body.encoding_format) for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(embedded)]
        return json_answer(_listed_answer(state, answer_id, data=data, num_tokens=sum(map(len, prompts))))

    @router.post("/v1/score", **takes(ScoreBody, *GENERATION, 501))
    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody, admission=state.admission)
        adapter = adapter_for(state, body.model)
        if body.pairs_name is not None:
            return json_answer(await _nearness(state, body, request, adapter=adapter))
        for name in ("query", "items", "label_token_ids"):
            if not getattr(body, name):
                raise ApiError(400, f"`{name}` is required, and not empty", param=name)
        prompts = await prompt_ids_of(state, body.prompts, param="items", request=request)
        stem = body.rid or uuid.uuid4().hex
        requests = [_request(body, prompt_ids, f"{stem}_{place}") for place, prompt_ids in enumerate(prompts)]
        requests = [replace(each, adapter=adapter) for each in requests]
        results = await _results(state, request, asked=requests, param_names=_PARAM_NAMES)
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        temperature = body.temperature if body.apply_softmax else None
        scores = [_scores(result, temperature=temperature) for result in results]
        return json_answer({"object": "scoring", "scores": scores, "model": state.card.name, "usage": usage})

    return router


def _listed_answer(state: ApiState, answer_id: str, *, data: list[dict], num_tokens: int) -> dict:
    """Return a list answer in the form of OpenAI and vLLM."""
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": state.card.name}
    return {**head, "data": data, "usage": usage}


def _check_shown(state: ApiState) -> None:
    """Raise ApiError 501 if hidden states do not leave the devices."""
    if not state.card.hidden_size:
        raise ApiError(501, _NOT_SHOWN, code="not_implemented")


def _embedding_request(prompt_ids: np.ndarray, request_id: str, *, salt: str) -> GenerationRequest:
    """Return a request for the state at the last token of a prompt."""
    asked = GenerationRequest(request_id, prompt_ids, _NO_TOKEN, cache_salt=salt, incremental=False)
    return replace(asked, return_hidden_states="last")


async def _states_of(state: ApiState, request: Request, *, asked: Sequence[GenerationRequest]) -> np.ndarray:
    """Run the requests and return the states at their last tokens, float32 [N, D]."""
    results = await _results(state, request, asked=asked, param_names={"prompt": "input"})
    return np.stack([_state(result) for result in results])


async def _results(
    state: ApiState, request: Request, *, asked: Sequence[GenerationRequest], param_names: Mapping[str, str]
) -> list[ChoiceResult]:
    streams = await open_streams(state, asked, param_names=param_names)
    try:
        return await while_connected(request.receive, streams.results())
    finally:
        streams.close()


def _unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [N, D] divided by their lengths; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def _state(result: ChoiceResult) -> np.ndarray:
    _, states = prompt_column(result, "hidden")
    if not len(states):
        raise ApiError(503, "the request was ended before it was computed")
    return states[0]


def _encoded(vector: np.ndarray, encoding: str) -> list[float] | str:
    """Return a list of numbers, or base64 of little-endian float32."""
    if encoding == "float":
        return vector.tolist()
    return pybase64.b64encode(vector.astype("<f4").tobytes()).decode()


async def _nearness(state: ApiState, body: ScoreBody, request: Request, *, adapter: str) -> dict:
    """Return the cosine similarity of each pair of embeddings, in vLLM's form."""
    _check_shown(state)
    names, texts = _pair_of(body)
    ids = [
        await prompt_ids_of(state, each, param=name, request=request) for name, each in zip(names, texts, strict=True)
    ]
    stem = body.rid or f"score-{uuid.uuid4().hex}"
    asked = [_embedding_request(each, f"{stem}_{i}", salt=body.cache_salt) for i, each in enumerate([*ids[0], *ids[1]])]
    asked = [replace(each, adapter=adapter) for each in asked]
    vectors = _unit_vectors(await _states_of(state, request, asked=asked))
    scores = np.sum(vectors[: len(ids[0])] * vectors[len(ids[0]) :], axis=1)
    data = [{"index": i, "object": "score", "score": float(score)} for i, score in enumerate(scores)]
    return _listed_answer(state, stem, data=data, num_tokens=sum(len(each.prompt_ids) for each in asked))


def _pair_of(body: ScoreBody) -> tuple[tuple[str, str], tuple[list[Prompt], list[Prompt]]]:
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
