"""Orders of samples that this replica holds, and the answers to their clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rayserve_moe.answers.native import native_answer
from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, encode_rollout, rollout_rows, routed_experts_info
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.streaming import to_json
from rayserve_moe.serving.api.answers.tinker import sample_json, sample_protobuf
from rayserve_moe.serving.api.schemas.tinker import TinkerSampleBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError, as_api_error

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Sampled:
    """Outcome of an order."""

    body: TinkerSampleBody
    request: GenerationRequest
    results: list[ChoiceResult]
    elapsed_s: float

    @property
    def num_bytes(self) -> int:
        """Return the approximate memory use in bytes."""
        rows = sum(each.routing.rows.nbytes for each in self.results if each.routing is not None)
        num_tokens = len(self.request.prompt_ids) + sum(len(each.token_ids) for each in self.results)
        width = 2 + self.body.topk_prompt_logprobs + self.body.topk_sample_logprobs
        return rows + 8 * num_tokens * width + 4096


@dataclass(frozen=True)
class Held:
    """State of an order on one replica: the answer for its client; `content` is None while it runs."""

    status: int = 200
    content: bytes | None = None
    media_type: str = "application/json"


async def held_future(state: ApiState, request_id: str, *, in_protobuf: bool, hold_s: float) -> Held | None:
    """Return what this replica knows of an order, after at most `hold_s`; None if nothing."""
    if (task := state.futures.get(request_id)) is None:
        return None
    if not task.done():
        await asyncio.wait([task], timeout=hold_s)
    if not task.done():
        return Held()
    if task.cancelled():
        return None
    if (error := task.exception()) is not None:
        return _failed(error)
    sampled: Sampled = task.result()
    parts = (sampled.body, sampled.results)
    num_prompt = len(sampled.request.prompt_ids)
    if in_protobuf:
        return Held(content=sample_protobuf(*parts, num_prompt=num_prompt), media_type=PROTOBUF)
    return Held(content=to_json(sample_json(*parts, num_prompt=num_prompt)))


async def held_evidence(state: ApiState, sequence_id: str) -> Held | None:
    """Return a finished sample of this replica as a rollout container, with its rows and versions; None if unknown."""
    request_id, _, number = sequence_id.rpartition(":")
    task = state.futures.get(request_id)
    if task is None or not task.done() or task.cancelled() or task.exception() is not None or not number.isdecimal():
        return None
    sampled: Sampled = task.result()
    if int(number) >= len(sampled.results):
        return None
    request, result, layout = sampled.request, sampled.results[int(number)], state.card.routing
    answer = native_answer(request, result, card=state.card, e2e_latency_s=sampled.elapsed_s, return_logprob=True)
    rows = []
    if result.routing is not None:
        answer["meta_info"]["routed_experts_info"] = routed_experts_info(result.routing, layout)
        rows = [rollout_rows(result.routing, layout)]
    return Held(content=encode_rollout(answer, rows, to_json=to_json), media_type=ROLLOUT_MEDIA_TYPE)


def _failed(error: BaseException) -> Held | None:
    """Return the final error of an order; None if another order may succeed."""
    refused = as_api_error(error) if isinstance(error, Exception) else ApiError(500, "internal error")
    if refused.status in (429, 503):
        return None
    category = "user" if refused.status < 500 else "server"
    return Held(content=to_json({"error": refused.message, "category": category}))
