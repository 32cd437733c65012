"""Answers of `/inference/v1/generate` in vLLM's dialect: token ids, and log-probs by token id."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import numpy as np
import pybase64

from rayserve_moe.answers.native import error_of, prompt_column, stop_reason
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.responses.evidence import prompt_logprobs
from rayserve_moe.serving.responses.logprobs import token_logprobs
from rayserve_moe.serving.responses.openai import usage_of
from rayserve_moe.serving.responses.routing import RoutingWriter
from rayserve_moe.serving.schemas.tokens import TokenBody


class TokenWriter:
    """Writes the answer to one request."""

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

    def defers(self, delta: ChoiceResult) -> bool:
        """No event waits."""
        return False

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the event of one choice; log-probs of the prompt come with its end."""
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
        """Return the event that counts tokens, if it was asked for."""
        if not (options := self._body.stream_options) or not options.include_usage:
            return []
        return [{**self._answer([]), "usage": usage_of(self._request_of_choice, results)}]

    def _answer(self, choices: list[dict]) -> dict:
        """Move the rows of a prompt, which all choices share, from the choice to the answer."""
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
        }

    def _prompt_logprobs(self, results: Sequence[ChoiceResult]) -> dict:
        num_top = self._body.sampling_params.prompt_logprobs
        if num_top is None:
            return {}
        result = next((result for result in results if result.prompt is not None), results[0])
        return {"prompt_logprobs": prompt_logprobs(self._request_of_choice[0], result, num_top=num_top)}

    def _listed(self, results: Sequence[ChoiceResult]) -> dict:
        """Log-probs of ids that are listed for the prompt: base64 of a `.npy` file, float32 [N, L]; -inf for none."""
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
