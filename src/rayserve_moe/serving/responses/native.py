"""Answers of `/generate` in SGLang's dialect: objects that hold all of a choice so far."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.engine.answers import ChoiceResult, native_fields
from rayserve_moe.requests import ModelCard
from rayserve_moe.serving.responses.request_streams import RequestStreams
from rayserve_moe.serving.responses.routing import RoutingWriter


class NativeWriter:
    """Writes the answer to one HTTP request: an object per choice, `as_list` in a list."""

    def __init__(
        self,
        card: ModelCard,
        streams: RequestStreams,
        *,
        routing: RoutingWriter,
        return_logprob: bool,
        as_list: bool,
    ) -> None:
        self._card, self._streams, self._routing = card, streams, routing
        self._return_logprob, self._as_list = return_logprob, as_list

    def whole(self, results: Sequence[ChoiceResult]) -> dict | list:
        """Return the answer of a request that does not stream."""
        answers = [self._answer(choice, result, result) for choice, result in enumerate(results)]
        return answers if self._as_list else answers[0]

    def waits_for(self, news: ChoiceResult) -> bool:
        """Every event stands for itself."""
        return False

    def chunk(self, choice: int, so_far: ChoiceResult, *, news: ChoiceResult) -> dict:
        """Return all of a choice so far, with the rows of routing that are new."""
        answer = self._answer(choice, so_far, news)
        return {**answer, "index": choice} if self._as_list else answer

    def closing(self, results: Sequence[ChoiceResult]) -> None:
        """Nothing follows the last choice."""

    def _answer(self, choice: int, so_far: ChoiceResult, news: ChoiceResult) -> dict:
        answer = native_fields(
            self._streams.request_of_choice[choice],
            so_far,
            card=self._card,
            e2e_latency_s=self._streams.elapsed_s[choice],
            return_logprob=self._return_logprob,
        )
        if self._routing.is_due(choice, news.routing, has_ended=news.finish is not None):
            start = self._routing.first_position(news.routing)
            answer["meta_info"] |= {**self._routing.fields(choice, news.routing), "routed_experts_start_len": start}
        return answer
