"""Route `/v1/embeddings`: hidden states at the last tokens of texts, as unit vectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pybase64
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.answers.native import prompt_column
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer, while_connected
from rayserve_moe.serving.api.routes.request_parts import check_model, checked_truncation, prompt_ids_of
from rayserve_moe.serving.api.schemas.embeddings import EmbeddingBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import GENERATION, takes

_NO_TOKEN = SamplingParams(max_new_tokens=0, seed=0)
NOT_SHOWN = (
    "hidden states stay on the devices of this server, and embeddings are such: start it with "
    "enable_return_hidden_states: true"
)


def embeddings_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/v1/embeddings", **takes(EmbeddingBody, *GENERATION, 501))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingBody, admission=state.admission)
        check_model(state, body.model)
        check_shown(state)
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
        asked = [embedding_request(ids, f"{answer_id}_{i}", salt=body.cache_salt) for i, ids in enumerate(prompts)]
        asked = [replace(each, priority=body.priority) for each in asked]
        vectors = await states_of(state, request, asked=asked)
        vectors = unit_vectors(vectors) if body.use_activation else vectors
        embedded = [_encoded(vector, body.encoding_format) for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(embedded)]
        return json_answer(listed_answer(state, answer_id, data=data, num_tokens=sum(map(len, prompts))))

    return router


def listed_answer(state: ApiState, answer_id: str, *, data: list[dict], num_tokens: int) -> dict:
    """Return a list answer in the form of OpenAI and vLLM."""
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": state.card.name}
    return {**head, "data": data, "usage": usage}


def check_shown(state: ApiState) -> None:
    """Raise ApiError 501 if hidden states do not leave the devices."""
    if not state.card.hidden_size:
        raise ApiError(501, NOT_SHOWN, code="not_implemented")


def embedding_request(prompt_ids: np.ndarray, request_id: str, *, salt: str) -> GenerationRequest:
    """Return a request for the state at the last token of a prompt."""
    asked = GenerationRequest(request_id, prompt_ids, _NO_TOKEN, cache_salt=salt, incremental=False)
    return replace(asked, return_hidden_states="last")


async def states_of(state: ApiState, request: Request, *, asked: Sequence[GenerationRequest]) -> np.ndarray:
    """Run the requests and return the states at their last tokens, float32 [N, D]."""
    streams = await open_streams(state, asked, param_names={"prompt": "input"})
    try:
        results = await while_connected(request.receive, streams.results())
    finally:
        streams.close()
    return np.stack([_state(result) for result in results])


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
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
