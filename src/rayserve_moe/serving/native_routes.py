"""`/generate`: the native route in SGLang's dialect.

A stream sends, per event, the whole answer of a choice so far: text and ids grow from event to event.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.answers import ChoiceResult, native_answer
from rayserve_moe.requests import GenerationRequest
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.json_body import read_body
from rayserve_moe.serving.native_schemas import GenerateBody
from rayserve_moe.serving.request_streams import RequestStreams, prompt_ids_of
from rayserve_moe.serving.streaming import EventStream, json_answer, while_connected


def native_router(state: ApiState) -> APIRouter:
    """Return the route over one engine."""
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateBody, ignored=state.ignored_fields)
        _note_ignored(state, body)
        streams = RequestStreams(state, await _requests(state, body), param_names=_param_names(body))
        if body.stream:
            return EventStream(_events(state, body, streams), streams.close)
        try:
            return json_answer(await while_connected(request.receive, _whole(state, body, streams)))
        finally:
            streams.close()

    return router


def _note_ignored(state: ApiState, body: GenerateBody) -> None:
    """Log nested unknown fields, and the request for log-probs of the prompt, which are not served yet."""
    for sampling in body.sampling_params:
        state.ignored_fields.note(sampling.model_extra or {})
    if body.return_logprob and body.logprob_start_len >= 0:
        state.ignored_fields.note(["logprob_start_len"])


def _param_names(body: GenerateBody) -> dict[str, str]:
    prompt = "input_ids" if body.text is None else "text"
    return {"prompt": prompt, "max_tokens": "sampling_params.max_new_tokens"}


async def _requests(state: ApiState, body: GenerateBody) -> list[GenerationRequest]:
    prompts = await prompt_ids_of(state, body.batch.prompts, param=_param_names(body)["prompt"])
    if body.routed_experts_start_len > min(map(len, prompts)):
        raise ApiError(400, "must not exceed the number of prompt tokens", param="routed_experts_start_len")
    sampling = body.sampling_params if len(body.sampling_params) > 1 else body.sampling_params * len(prompts)
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=params.sampling(params.max_new_tokens, params.sampling_seed),
            return_routed_experts=body.return_routed_experts,
            cache_salt=body.cache_salt,
            incremental=body.stream or bool(params.stop),
        )
        for request_id, prompt_ids, params in zip(_request_ids(body), prompts, sampling, strict=True)
    ]


def _request_ids(body: GenerateBody) -> list[str]:
    if isinstance(body.rid, list):
        return body.rid
    stem = body.rid or uuid.uuid4().hex
    return [f"{stem}_{position}" for position in range(len(body.batch.prompts))] if body.batch.is_batch else [stem]


async def _whole(state: ApiState, body: GenerateBody, streams: RequestStreams) -> dict | list[dict]:
    answers = {choice: answer async for choice, answer in _answers(state, body, streams)}
    in_order = [answers[choice] for choice in sorted(answers)]
    return in_order if _is_list(body, streams) else in_order[0]


async def _events(state: ApiState, body: GenerateBody, streams: RequestStreams) -> AsyncGenerator[dict, None]:
    is_list = _is_list(body, streams)
    async for choice, answer in _answers(state, body, streams):
        yield {**answer, "index": choice} if is_list else answer


async def _answers(
    state: ApiState, body: GenerateBody, streams: RequestStreams
) -> AsyncGenerator[tuple[int, dict], None]:
    """Yield the answers of choices as they end, and in a stream also as they grow."""
    started_s = time.monotonic()
    results = [ChoiceResult() for _ in streams.request_of_choice]
    async for group in streams.groups():
        for choice, delta in group:
            results[choice].add(delta)
        for choice in dict.fromkeys(choice for choice, _ in group):
            if body.stream or results[choice].finish is not None:
                yield (
                    choice,
                    native_answer(
                        streams.request_of_choice[choice],
                        results[choice],
                        card=state.card,
                        e2e_latency_s=time.monotonic() - started_s,
                        return_logprob=body.return_logprob,
                        routed_experts_start=body.routed_experts_start_len,
                    ),
                )


def _is_list(body: GenerateBody, streams: RequestStreams) -> bool:
    return body.batch.is_batch or len(streams.request_of_choice) > 1
