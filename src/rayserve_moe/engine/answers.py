"""Answers to one request: what the deltas of a choice add up to, and its form in the native (SGLang) dialect.

Both the HTTP routes and the in-process engine build their answers here, so that they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayserve_moe.replay.encoding import encode_routed_experts, routed_experts_info, routing_from
from rayserve_moe.requests import FinishReason, GenerationRequest, ModelCard, RoutedExperts, RoutingLayout
from rayserve_moe.text.choice_text import ChoiceDelta


@dataclass
class ChoiceResult:
    """One choice as far as it has come. `finish` and `routing` are there once it has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    routing: RoutedExperts | None = None
    num_cached_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Take in the next delta of this choice."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish or self.finish
        self.routing = delta.routing or self.routing
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)


def native_answer(
    request: GenerationRequest,
    result: ChoiceResult,
    *,
    card: ModelCard,
    e2e_latency_s: float,
    return_logprob: bool = False,
    routed_experts_start: int = 0,
) -> dict:
    """Return the `/generate` object of one choice; while it runs, `finish_reason` is None and routing is absent.

    Each entry of `output_token_logprobs` is [log-prob, token id, None]. Routing rows before position
    `routed_experts_start` are left out.
    """
    meta_info = {
        "id": request.request_id,
        "finish_reason": _native_finish_reason(result),
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.num_cached_tokens,
        "e2e_latency": e2e_latency_s,
        "weight_version": card.weight_version,
    }
    if return_logprob:
        pairs = zip(result.logprobs, result.token_ids, strict=True)
        meta_info["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
    if request.return_routed_experts and result.finish is not None:
        meta_info.update(routing_fields(result.routing, card.routing, start=routed_experts_start))
        meta_info["routed_experts_start_len"] = routed_experts_start
    return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta_info}


def routing_fields(routing: RoutedExperts | None, layout: RoutingLayout, *, start: int = 0) -> dict:
    """Return `routed_experts` and `routed_experts_info` for the rows from `start`; both None where nothing is known."""
    if routing is None:
        return {"routed_experts": None, "routed_experts_info": None}
    wanted = routing_from(routing, start)
    return {
        "routed_experts": encode_routed_experts(wanted, layout),
        "routed_experts_info": routed_experts_info(wanted, layout),
    }


def _native_finish_reason(result: ChoiceResult) -> dict | None:
    finish = result.finish
    if finish is None:
        return None
    reason: dict = {"type": finish.kind}
    if finish.kind == "length":
        reason["length"] = len(result.token_ids)
    if finish.matched is not None:
        reason["matched"] = finish.matched
    if finish.message is not None:
        reason["message"] = finish.message
    return reason
