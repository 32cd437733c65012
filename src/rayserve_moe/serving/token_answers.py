"""Answers of `/inference/v1/generate` in vLLM's dialect: token ids, and log-probs by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayserve_moe.engine.answers import ChoiceResult, likeliest
from rayserve_moe.requests import GenerationRequest, PromptScores
from rayserve_moe.serving.logprob_answers import TokenLogprobs
from rayserve_moe.serving.openai_answers import usage_of
from rayserve_moe.serving.routing_answers import RoutingWriter


@dataclass(frozen=True)
class TokenParts:
    """What an answer shows besides tokens: how many of the likeliest with each log-prob, None for no log-probs."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    usage_event: bool = False


class TokenWriter:
    """Writes the answer to one HTTP request."""

    def __init__(
        self,
        answer_id: str,
        parts: TokenParts,
        *,
        routing: RoutingWriter,
        request_of_choice: Sequence[GenerationRequest],
    ) -> None:
        self._id, self._parts, self._routing = answer_id, parts, routing
        self._request_of_choice = request_of_choice
        self._logprobs = None if parts.num_logprobs is None else TokenLogprobs(num_top=parts.num_logprobs)

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the answer of a request that does not stream."""
        choices = [self._choice(choice, result) for choice, result in enumerate(results)]
        return {
            **self._answer(choices),
            **self._prompt_logprobs(results),
            "usage": usage_of(self._request_of_choice, results),
        }

    def waits_for(self, news: ChoiceResult) -> bool:
        """Every event stands for itself."""
        return False

    def chunk(self, choice: int, so_far: ChoiceResult, *, news: ChoiceResult) -> dict:
        """Return the event that brings what is new to one choice; log-probs of the prompt come with an end."""
        prompt_logprobs = self._prompt_logprobs([news]) if news.finish is not None else {}
        return {**self._answer([self._choice(choice, news)]), **prompt_logprobs}

    def closing(self, results: Sequence[ChoiceResult]) -> dict | None:
        """Return the event that counts tokens, if it was asked for."""
        if not self._parts.usage_event:
            return None
        return {**self._answer([]), "usage": usage_of(self._request_of_choice, results)}

    def _answer(self, choices: list[dict]) -> dict:
        """Rows of a prompt that belong to all choices stand beside them."""
        shared = [choice.pop("prompt_routed_experts") for choice in choices if "prompt_routed_experts" in choice]
        return {
            "request_id": self._id,
            "choices": choices,
            **({"prompt_routed_experts": next(filter(None, shared), None)} if shared else {}),
        }

    def _choice(self, choice: int, news: ChoiceResult) -> dict:
        routing = {}
        if self._routing.is_due(choice, news.routing, has_ended=news.finish is not None):
            routing = self._routing.fields(choice, news.routing)
        return {
            "index": choice,
            "token_ids": list(news.token_ids),
            "finish_reason": None if news.finish is None else news.finish.kind,
            "logprobs": None if self._logprobs is None else self._logprobs.write(news),
            **routing,
        }

    def _prompt_logprobs(self, results: Sequence[ChoiceResult]) -> dict:
        """One object per prompt token, by token id, of the token itself and of the likeliest; null for the first."""
        num_top = self._parts.num_prompt_logprobs
        if num_top is None:
            return {}
        prompt_ids = self._request_of_choice[0].prompt_ids.tolist()
        scores = next((result.prompt_scores for result in results if result.prompt_scores is not None), None)
        told = [] if scores is None else _objects(scores, prompt_ids, num_top)
        return {"prompt_logprobs": [None, *told, *[None] * (len(prompt_ids) - 1 - len(told))]}


def _objects(scores: PromptScores, prompt_ids: Sequence[int], num_top: int) -> list[dict]:
    values = scores.logprobs.tolist()
    tops = [[] for _ in values] if scores.top is None else likeliest(scores.top)
    objects = []
    for token_id, value, top in zip(prompt_ids[1:], values, tops, strict=False):
        ranks = {other: rank for rank, (_, other) in enumerate(top, start=1)}
        entries = {other: logprob for logprob, other in top[:num_top]} | {token_id: value}
        objects.append({str(other): {"logprob": lp, "rank": ranks.get(other)} for other, lp in entries.items()})
    return objects
