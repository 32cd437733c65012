"""Route `/generate` in SGLang's dialect, and the writer of its answers.

Every event of a stream has the accumulated answer of a choice, so text and ids grow from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.answers.native import native_answer
from rayserve_moe.requests.builder import build_request, param_names
from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import SGLANG
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.answering import Writer, respond, rollout_type
from rayserve_moe.serving.api.answers.request_streams import RequestStreams, open_streams, refusals_named
from rayserve_moe.serving.api.answers.routing import RoutingWriter
from rayserve_moe.serving.api.routes.request_parts import adapters_for_prompts, forced_rows_of, prompt_ids_of
from rayserve_moe.serving.api.schemas.native import GenerateBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.journalling import Asking, answer_stem, asking_of
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates

_PARAM_NAMES = {
    **param_names(SGLANG, SamplingParams, prefix="sampling_params."),
    **param_names(SGLANG, ConstraintFields, prefix="sampling_params."),
    **param_names(SGLANG, GenerationRequest),
    "listed_in_prompt": "token_ids_logprob",
}


def native_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/generate", **generates(GenerateBody, in_containers=True))
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateBody, admission=state.admission)
        adapters = adapters_for_prompts(state, body.lora_path, num_prompts=len(body.batch.prompts))
        container = rollout_type(request, stream=body.stream)
        names = {**_PARAM_NAMES, "prompt": body.prompt_name}
        with refusals_named(names):
            requests = await _requests(state, body, request, adapters=adapters)
        streams = await open_streams(state, requests, param_names=names, scope=request.scope)
        routing = RoutingWriter(
            state.card,
            "binary" if container else body.routed_experts_format,
            shares_prompt_rows=container is not None,
            request_of_choice=streams.request_of_choice,
            index_form=body.indexer_topk_format,
        )
        writer = NativeWriter(state, body, streams=streams, routing=routing)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream, container=container)

    return router


async def _requests(
    state: ApiState, body: GenerateBody, http_request: Request, *, adapters: Sequence[str]
) -> list[GenerationRequest]:
    prompts = await prompt_ids_of(state, body.batch.prompts, param=body.prompt_name, request=http_request)
    forced = await forced_rows_of(state, body, prompts=prompts, is_batch=body.batch.is_batch)
    sampling = body.sampling_params if len(body.sampling_params) > 1 else body.sampling_params * len(prompts)
    given = [
        body.of_prompt(place) | {"lora_path": adapter} | {name: value for name, value in params if value is not None}
        for place, (params, adapter) in enumerate(zip(sampling, adapters, strict=True))
    ]
    ids = _request_ids(body, asking_of(http_request.scope))
    return [
        build_request(prompt_ids, each, dialect=SGLANG, card=state.card, request_id=request_id, forced=rows)
        for request_id, prompt_ids, each, rows in zip(ids, prompts, given, forced, strict=True)
    ]


def _request_ids(body: GenerateBody, asking: Asking | None) -> list[str]:
    if isinstance(body.rid, list):
        return body.rid
    stem = body.rid or answer_stem(asking)
    return [f"{stem}_{position}" for position in range(len(body.batch.prompts))] if body.batch.is_batch else [stem]


class NativeWriter(Writer):
    """Writer of an answer: an object per choice, in a list for a batch or several choices."""

    def __init__(self, state: ApiState, body: GenerateBody, *, streams: RequestStreams, routing: RoutingWriter) -> None:
        self.routing = routing
        self._card, self._body, self._streams = state.card, body, streams
        self._token_text = state.tokenizer.token_text if body.return_text_in_logprobs else None
        ids = list(dict.fromkeys(request.request_id for request in streams.request_of_choice))
        self._scored = {request_id: body.of_prompt(place)["return_logprob"] for place, request_id in enumerate(ids)}
        self._as_list = body.batch.is_batch or len(streams.request_of_choice) > 1

    def whole(self, results: Sequence[ChoiceResult]) -> dict | list:
        """Return the answer of a request that does not stream."""
        answers = [self._answer(choice, result, result) for choice, result in enumerate(results)]
        return answers if self._as_list else answers[0]

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the accumulated choice with its new routing rows."""
        answer = self._answer(choice, so_far, delta)
        return [{**answer, "index": choice} if self._as_list else answer]

    def _answer(self, choice: int, so_far: ChoiceResult, delta: ChoiceResult) -> dict:
        request = self._streams.request_of_choice[choice]
        answer = native_answer(
            request,
            so_far,
            card=self._card,
            e2e_latency_s=self._streams.elapsed_s[choice],
            return_logprob=self._scored[request.request_id],
            token_text=self._token_text,
            arrays=self.routing.arrays_of(choice),
        )
        answer["meta_info"] |= self.routing.sglang_fields(choice, delta)
        if self._body.return_prompt_token_ids:
            answer["prompt_token_ids"] = self._streams.request_of_choice[choice].prompt_ids.tolist()
        return answer
