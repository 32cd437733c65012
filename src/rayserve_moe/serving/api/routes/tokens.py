"""Route `/inference/v1/generate`, tokens in and out, in vLLM's dialect, and the writer of its answers.

SkyRL has its own name for the route.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pybase64
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.answers.native import NO_ENTRIES, NO_VALUES, column_fields, error_of, prompt_column, stop_reason
from rayserve_moe.requests.builder import build_request, param_names
from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import VLLM
from rayserve_moe.requests.records import ROW_START, GenerationRequest, ModelCard, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.answering import Writer, respond, rollout_type
from rayserve_moe.serving.api.answers.evidence import prompt_logprobs
from rayserve_moe.serving.api.answers.logprobs import token_logprobs
from rayserve_moe.serving.api.answers.openai import usage_of
from rayserve_moe.serving.api.answers.request_streams import open_streams, refusals_named
from rayserve_moe.serving.api.answers.routing import RoutingWriter
from rayserve_moe.serving.api.routes.request_parts import (
    adapter_for,
    checked_truncation,
    forced_rows_of,
    prompt_ids_of,
)
from rayserve_moe.serving.api.schemas.tokens import IN_SAMPLING, START, TokenBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import generates

_PARAM_NAMES = {
    **param_names(VLLM, SamplingParams, prefix="sampling_params."),
    **param_names(VLLM, ConstraintFields, prefix="sampling_params."),
    **{name: f"sampling_params.{name}" for name in IN_SAMPLING},
    "listed_in_prompt": "sampling_params.prompt_logprob_token_ids",
    "prompt": "token_ids",
    "rid": "request_id",
    ROW_START: f"sampling_params.{START}",
}
_MAX_UINT8_EXPERTS, _MAX_INT16_EXPERTS = 2**8, 2**15
_SKYRL = "/skyrl/v1/generate"
"""SkyRL's route; its client reads uint8 and int16, never uint16."""


def token_router(state: ApiState) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post(_SKYRL, **generates(TokenBody, in_containers=True))
    @router.post("/inference/v1/generate", **generates(TokenBody, in_containers=True))
    async def generate(request: Request) -> Response:
        body = await read_body(request, TokenBody, admission=state.admission)
        adapter = adapter_for(state, body.model)
        container = rollout_type(request, stream=body.stream)
        streams = await open_streams(
            state,
            [replace(await _request(state, body, request), adapter=adapter)],
            param_names=_PARAM_NAMES,
            scope=request.scope,
        )
        dtype = body.routed_experts_dtype
        if request.url.path.endswith(_SKYRL) and state.card.routing.num_experts > _MAX_UINT8_EXPERTS:
            dtype = "int16"
        routing = _routing_writer(state, body, streams.request_of_choice, dtype=dtype, in_container=bool(container))
        writer = TokenWriter(state.card, body, request_of_choice=streams.request_of_choice, routing=routing)
        return await respond(state, request, streams=streams, writer=writer, stream=body.stream, container=container)

    return router


async def _request(state: ApiState, body: TokenBody, http_request: Request) -> GenerationRequest:
    """Return the engine's request. Routing is requested unless it is switched off or the server captures none."""
    num_tokens, keeps = body.sampling_params.truncate_prompt_tokens, max(1, state.card.max_model_len - 1)
    truncation = checked_truncation(state, num_tokens, side="left", keeps=keeps)
    prompts = await prompt_ids_of(
        state, [body.token_ids], param="token_ids", request=http_request, truncation=truncation
    )
    if body.routed_experts_dtype and state.card.routing.num_experts > _MAX_INT16_EXPERTS:
        raise ApiError(400, "`routed_experts_dtype` cannot hold the expert ids", param="routed_experts_dtype")
    (rows,) = await forced_rows_of(state, body, prompts=prompts, is_batch=False)
    with refusals_named(_PARAM_NAMES):
        return build_request(
            prompts[0], body.given(), dialect=VLLM, card=state.card, request_id=body.request_id, forced=rows
        )


def _routing_writer(
    state: ApiState,
    body: TokenBody,
    request_of_choice: Sequence[GenerationRequest],
    *,
    dtype: str | None,
    in_container: bool,
) -> RoutingWriter:
    dialect = "binary" if in_container else body.routed_experts_format
    if dialect == "packed" and dtype:
        dialect = f"packed-{dtype}"
    return RoutingWriter(
        state.card,
        dialect,
        shares_prompt_rows=dialect in ("binary", "nested"),
        request_of_choice=request_of_choice,
        index_form=body.indexer_topk_format,
    )


class TokenWriter(Writer):
    """Writer of an answer: token ids, and log-probs by token id."""

    def __init__(
        self,
        card: ModelCard,
        body: TokenBody,
        *,
        request_of_choice: Sequence[GenerationRequest],
        routing: RoutingWriter,
    ) -> None:
        self.routing = routing
        self._has_begun = False
        self._card, self._body, self._request_of_choice = card, body, request_of_choice
        request_id = request_of_choice[0].request_id
        self._envelope = {"request_id": request_id, "model": card.name, "created": int(time.time())}

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the answer of a request that does not stream."""
        return {
            **self._answer([self._choice(choice, result) for choice, result in enumerate(results)]),
            **self._prompt_logprobs(results),
            **self._prompt_ids(),
            **self._listed(results),
            "usage": usage_of(self._request_of_choice, results),
        }

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the event of a choice; log-probs of the prompt are in its last event."""
        event = self._answer([self._choice(choice, delta)])
        if not self._has_begun:
            event |= self._prompt_ids()
        self._has_begun = True
        if delta.finish is not None:
            event |= self._prompt_logprobs([delta])
        if (options := self._body.stream_options) and options.usage_in_events:
            event["usage"] = usage_of([self._request_of_choice[choice]], [so_far])
        return [event]

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """Return the requested event with token counts."""
        if not (options := self._body.stream_options) or not options.include_usage:
            return []
        return [{**self._answer([]), "usage": usage_of(self._request_of_choice, results)}]

    def _answer(self, choices: list[dict]) -> dict:
        """Return the answer, with the prompt's rows moved from the choice that holds them."""
        shared = [choice.pop("prompt_routed_experts") for choice in choices if "prompt_routed_experts" in choice]
        return {
            **self._envelope,
            "choices": choices,
            **({"prompt_routed_experts": next(filter(None, shared), None)} if shared else {}),
        }

    def _choice(self, choice: int, delta: ChoiceResult) -> dict:
        request, num_logprobs = self._request_of_choice[choice], self._body.sampling_params.logprobs
        listed_ids = request.logprob_token_ids
        return {
            "index": choice,
            "token_ids": list(delta.token_ids),
            "finish_reason": None if delta.finish is None else delta.finish.kind,
            "stop_reason": stop_reason(delta, request, eos_token_ids=self._card.eos_token_ids),
            **error_of(delta.finish),
            "logprobs": None
            if num_logprobs is None
            else token_logprobs(delta, num_logprobs=num_logprobs, listed_ids=listed_ids),
            **self.routing.fields(choice, delta),
            **self.routing.index_fields(choice, delta),
            **self._mask(choice, delta),
        }

    def _mask(self, choice: int, delta: ChoiceResult) -> dict:
        """Return `sampling_mask` as vLLM does and the outputs' log-probs within it; empty unless requested."""
        columns, arrays = delta.columns, self.routing.arrays_of(choice)
        if not self._request_of_choice[choice].return_sampling_mask:
            return {}
        mask, logprobs = columns.get("mask_ids", NO_ENTRIES), columns.get("mask_logprobs", NO_VALUES).tolist()
        return {**column_fields(mask, arrays, name="sampling_mask"), "sampling_logprobs": logprobs}

    def _prompt_logprobs(self, results: Sequence[ChoiceResult]) -> dict:
        num_top = self._body.sampling_params.prompt_logprobs
        if num_top is None:
            return {}
        result = next((result for result in results if result.prompt is not None), results[0])
        return {"prompt_logprobs": prompt_logprobs(self._request_of_choice[0], result, num_top=num_top)}

    def _listed(self, results: Sequence[ChoiceResult]) -> dict:
        """Return log-probs of ids listed for the prompt: base64 of a `.npy` file, float32 [N, L]; -inf for padding."""
        if (listed := self._request_of_choice[0].listed_in_prompt) is None:
            return {}
        result = next((result for result in results if result.prompt is not None), None)
        if result is None:
            return {"prompt_token_id_logprobs": None}
        _, found = prompt_column(result, "listed_logprobs")
        buffer = io.BytesIO()
        np.save(buffer, np.where(listed.ids[: len(found)] < 0, np.float32(-np.inf), found), allow_pickle=False)
        return {"prompt_token_id_logprobs": pybase64.b64encode(buffer.getbuffer()).decode()}

    def _prompt_ids(self) -> dict:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._request_of_choice[0].prompt_ids.tolist()}
