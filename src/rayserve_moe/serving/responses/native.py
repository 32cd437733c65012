"""Answers of `/generate` in SGLang's dialect: objects that hold all of a choice so far."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.answers.native import native_answer
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.responses.request_streams import RequestStreams
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.schemas.native import GenerateBody


class NativeWriter:
    """Writes the answer to one request: an object per choice, in a list for a batch or several choices."""

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

    def defers(self, delta: ChoiceResult) -> bool:
        """No event waits."""
        return False

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return all of a choice so far, with the rows of routing that are new."""
        answer = self._answer(choice, so_far, delta)
        return [{**answer, "index": choice} if self._as_list else answer]

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """No event follows the last choice."""
        return []

    def _answer(self, choice: int, so_far: ChoiceResult, delta: ChoiceResult) -> dict:
        request = self._streams.request_of_choice[choice]
        answer = native_answer(
            request,
            so_far,
            card=self._card,
            e2e_latency_s=self._streams.elapsed_s[choice],
            return_logprob=self._scored[request.request_id],
            token_text=self._token_text,
        )
        answer["meta_info"] |= self.routing.sglang_fields(choice, delta)
        if self._body.return_prompt_token_ids:
            answer["prompt_token_ids"] = self._streams.request_of_choice[choice].prompt_ids.tolist()
        return answer
