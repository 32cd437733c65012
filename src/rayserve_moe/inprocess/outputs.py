"""What `LLM` answers: one `RequestOutput` per prompt, under vLLM's names, with routing as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.answers.native import ChoiceResult, TokenLogprob, output_logprobs, prompt_logprobs_of, stop_reason
from rayserve_moe.inprocess.arguments import SamplingParams
from rayserve_moe.replay.encoding import routed_experts_info, routing_from
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts, RoutingLayout
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-prob of one token at one position, and its place among all tokens there: the likeliest has `rank` 1."""

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""By token id: the token that stands at the position first, then the likeliest ones."""


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    `routed_experts` is int16 [rows, MoE layers, k] of the positions from the first generated token on: one row fewer
    than tokens, for the last one never enters the model. It is None where the engine does not capture routing, and
    where any row is missing; `routed_experts_info` then says which.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    routed_experts: np.ndarray | None
    routed_experts_info: dict | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    `prompt_routed_experts` is int16 [prompt tokens, MoE layers, k], the same for all completions, or None as
    `CompletionOutput.routed_experts` is. The first entry of `prompt_logprobs` is None: nothing precedes it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_routed_experts: np.ndarray | None
    num_cached_tokens: int


@dataclass(frozen=True)
class OutputWriter:
    """Writes the outputs of one model."""

    tokenizer: Tokenizer
    layout: RoutingLayout

    def request_output(
        self, request: GenerationRequest, results: Sequence[ChoiceResult], *, params: SamplingParams, prompt: str | None
    ) -> RequestOutput:
        """Put together what came of one request; `params` are those that it was made of."""
        num_prompt_tokens = len(request.prompt_ids)
        start = params.routed_experts_prompt_start
        found = (_rows(result.routing, start, num_prompt_tokens) for result in results)
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_ids.tolist(),
            prompt_logprobs=self._prompt_logprobs(request, results[0], params.prompt_logprobs),
            outputs=[
                self._completion(index, result, params=params, request=request) for index, result in enumerate(results)
            ],
            finished=all(result.finish is not None for result in results),
            prompt_routed_experts=next((rows for rows in found if rows is not None), None),
            num_cached_tokens=results[0].num_cached_tokens,
        )

    def _completion(
        self, index: int, result: ChoiceResult, *, params: SamplingParams, request: GenerationRequest
    ) -> CompletionOutput:
        routing, finish, num_prompt_tokens = result.routing, result.finish, len(request.prompt_ids)
        reason = stop_reason(result, request, eos_token_ids=self.tokenizer.eos_token_ids)
        end = num_prompt_tokens if routing is None else max(num_prompt_tokens, routing.start + len(routing.rows))
        info = None
        if routing is not None:
            info = routed_experts_info(routing_from(routing, params.routed_experts_prompt_start), self.layout)
        logprobs = None
        if params.logprobs is not None:
            listed_ids = request.logprob_token_ids
            found = output_logprobs(result, num_top=params.logprobs, listed_ids=listed_ids)
            logprobs = list(map(self._by_id, found))
        return CompletionOutput(
            index=index,
            text=result.text,
            token_ids=list(result.token_ids),
            cumulative_logprob=float(sum(result.logprobs)),
            logprobs=logprobs,
            finish_reason=finish.kind if finish else None,
            stop_reason=finish.message if finish and finish.message is not None else reason,
            routed_experts=_rows(routing, num_prompt_tokens, end),
            routed_experts_info=info,
        )

    def _prompt_logprobs(
        self, request: GenerationRequest, result: ChoiceResult, num_top: int | None
    ) -> list[TokenLogprobs | None] | None:
        if num_top is None or result.prompt is None or "logprobs" not in result.prompt.columns:
            return None
        scored = prompt_logprobs_of(result, request.prompt_ids.tolist(), num_top=num_top)
        return [None if tokens is None else self._by_id(tokens) for tokens in scored]

    def _by_id(self, tokens: Sequence[TokenLogprob]) -> TokenLogprobs:
        return {token.token_id: Logprob(token.logprob, token.rank, self._text(token.token_id)) for token in tokens}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)


def _rows(routing: RoutedExperts | None, first: int, last: int) -> np.ndarray | None:
    """Rows of positions `[first, last)`, or None unless every one of them is known."""
    if routing is None or first < routing.start or routing.start + len(routing.rows) < last:
        return None
    if any(begin < last and end > first for begin, end in routing.missing):
        return None
    return routing.rows[first - routing.start : last - routing.start].astype(np.int16)
