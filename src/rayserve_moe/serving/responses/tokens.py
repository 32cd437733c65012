"""Answers of `/inference/v1/generate` in vLLM's dialect: token ids, and log-probs by token id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayserve_moe.engine.answers import ChoiceResult, ToldToken, stop_reason, told_prompt
from rayserve_moe.requests import GenerationRequest, ModelCard
from rayserve_moe.serving.responses.logprobs import TokenLogprobs
from rayserve_moe.serving.responses.openai import usage_of
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.schemas.openai import StreamOptions


@dataclass(frozen=True)
class TokenParts:
    """What an answer shows besides tokens: how many of the likeliest with each log-prob, None for no log-probs."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    usage: StreamOptions = field(default_factory=StreamOptions)


class TokenWriter:
    """Writes the answer to one HTTP request."""

    def __init__(
        self,
        answer_id: str,
        parts: TokenParts,
        *,
        card: ModelCard,
        routing: RoutingWriter,
        request_of_choice: Sequence[GenerationRequest],
    ) -> None:
        self._envelope = {"request_id": answer_id, "model": card.name, "created": int(time.time())}
        self._card, self._parts, self._routing = card, parts, routing
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
        usage = {}
        if self._parts.usage.usage_in_events:
            usage = {"usage": usage_of([self._request_of_choice[choice]], [so_far])}
        return {**self._answer([self._choice(choice, news)]), **prompt_logprobs, **usage}

    def closing(self, results: Sequence[ChoiceResult]) -> dict | None:
        """Return the event that counts tokens, if it was asked for."""
        if not self._parts.usage.include_usage:
            return None
        return {**self._answer([]), "usage": usage_of(self._request_of_choice, results)}

    def _answer(self, choices: list[dict]) -> dict:
        """Rows of a prompt that belong to all choices stand beside them."""
        shared = [choice.pop("prompt_routed_experts") for choice in choices if "prompt_routed_experts" in choice]
        return {
            **self._envelope,
            "choices": choices,
            **({"prompt_routed_experts": next(filter(None, shared), None)} if shared else {}),
        }

    def _choice(self, choice: int, news: ChoiceResult) -> dict:
        routing, request = {}, self._request_of_choice[choice]
        if self._routing.is_due(choice, news.routing, has_ended=news.finish is not None):
            routing = self._routing.fields(choice, news.routing)
        return {
            "index": choice,
            "token_ids": list(news.token_ids),
            "finish_reason": None if news.finish is None else news.finish.kind,
            "stop_reason": stop_reason(news, request, eos_token_ids=self._card.eos_token_ids),
            "logprobs": None if self._logprobs is None else self._logprobs.write(news),
            **routing,
        }

    def _prompt_logprobs(self, results: Sequence[ChoiceResult]) -> dict:
        """One object per prompt token, by token id, of the token itself, then of the likeliest; null for the first."""
        num_top = self._parts.num_prompt_logprobs
        if num_top is None:
            return {}
        prompt_ids = self._request_of_choice[0].prompt_ids.tolist()
        scores = next((result.prompt_scores for result in results if result.prompt_scores is not None), None)
        told = told_prompt(scores, prompt_ids, num_top=num_top)
        return {"prompt_logprobs": [None if tokens is None else _by_id(tokens) for tokens in told]}


def _by_id(told: Sequence[ToldToken]) -> dict[str, dict]:
    """The entry of one position; clients read the first value of it as the token's own."""
    return {str(token.token_id): {"logprob": token.logprob, "rank": token.rank} for token in told}
