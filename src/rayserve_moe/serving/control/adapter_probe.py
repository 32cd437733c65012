"""Distance of merged weights from the same adapter beside the weights, on tokens that the latter samples."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

import numpy as np

from rayserve_moe.answers.native import prompt_column
from rayserve_moe.checkpoints.bucket import SentAdapter
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api_state import ApiState

NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS = 16, 64
WITHIN_S = 60.0
"""Maximum time of a request of the probe; a pause may hold it."""


@dataclass(frozen=True)
class AdapterProbe:
    """Tokens sampled by an adapter beside the weights, with their log-probs."""

    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray

    async def kl(self, state: ApiState) -> float | None:
        """Return the KL divergence in nats per token of the serving weights from the adapter; None if it is not found.

        It is the mean of r - 1 - ln r over the sampled tokens, with r their ratio of probabilities.
        """
        ids = np.concatenate([self.prompt_ids, self.sampled_ids])
        params = SamplingParams(max_new_tokens=0)
        result = await _answer(state, _request(ids, params, score_prompt_from=len(self.prompt_ids) - 1))
        _, found = (0, np.zeros(0)) if result is None else prompt_column(result, "logprobs")
        if len(found) != len(self.sampled_ids):
            return None
        log_ratio = found.astype(np.float64) - self.logprobs
        return float(np.mean(np.expm1(log_ratio) - log_ratio))


async def probe_of(state: ApiState, adapter: SentAdapter) -> AdapterProbe | None:
    """Sample from an adapter beside the weights; None while paused, or if it has no place beside the weights."""
    loads = state.loop.control.adapters
    if loads is None or state.loop.control.is_paused:
        return None
    name = f"probe-{uuid.uuid4().hex}"
    if not (await asyncio.wrap_future(loads.load(adapter, name))).success:
        return None
    try:
        ids = np.random.default_rng(0).integers(0, state.card.vocab_size, NUM_PROMPT_TOKENS).astype(np.int32)
        num_new = min(NUM_SAMPLED_TOKENS, state.card.max_model_len - len(ids))
        params = SamplingParams(max_new_tokens=num_new, seed=0, ignore_eos=True)
        result = await _answer(state, _request(ids, params, adapter=name))
    finally:
        await asyncio.wrap_future(loads.unload(name))
    if result is None:
        return None
    return AdapterProbe(ids, np.asarray(result.token_ids, np.int32), np.asarray(result.logprobs, np.float64))


def _request(
    ids: np.ndarray, params: SamplingParams, *, adapter: str = "", score_prompt_from: int | None = None
) -> GenerationRequest:
    return GenerationRequest(
        uuid.uuid4().hex, ids, params, adapter=adapter, incremental=False, score_prompt_from=score_prompt_from
    )


async def _answer(state: ApiState, request: GenerationRequest) -> ChoiceResult | None:
    """Return the result of a request; None if it is not answered in time."""
    streams = await open_streams(state, [request])
    try:
        (result,) = await asyncio.wait_for(streams.results(), WITHIN_S)
    except TimeoutError:
        return None
    finally:
        streams.close()
    return result
