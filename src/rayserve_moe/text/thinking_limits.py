"""Limits of reasoning with the markers that stand around it in the answers of a model."""

from __future__ import annotations

from dataclasses import replace

from rayserve_moe.requests.reasoning_span import ThinkingLimit
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.text.chat_output import ChatOutput

NO_LIMIT = -1


def with_thinking_limit(request: GenerationRequest, output: ChatOutput) -> GenerationRequest:
    """The request with the markers of the reasoning that it limits, if it does. RequestError where none are known."""
    budget, param = request.thinking_token_budget, "thinking_token_budget"
    if budget is None or budget == NO_LIMIT:
        return request
    markers = output.reasoning_markers(request.prompt_ids)
    if markers is None:
        raise RequestError("how this model marks its reasoning is not known: set `reasoning_parser`", param)
    if set(markers.end_ids) & set(request.sampling.stop_token_ids):
        raise RequestError("reasoning would end with one of the ids that end the answer", "stop_token_ids")
    return replace(request, thinking=ThinkingLimit(budget, markers))
