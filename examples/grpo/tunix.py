"""A run's sampler over tunix' `Sampler` protocol, with tunix' requests, answers and weight syncs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import numpy as np

from examples.grpo.sampler import SEEDS, Sampler
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.adapters.tunix import UNSET
from rayserve_moe.rollouts.adapters.tunix_sampler import SamplingResponse, TunixSampler
from rayserve_moe.rollouts.alignment import served_layout
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient

MOST_TRIES = 3
_Result = TypeVar("_Result")


class TunixSampling:
    """Context manager around a `Sampler`'s server, with the sampler's methods. Callable from several threads."""

    def __init__(self, server: Sampler) -> None:
        self._server, self._loop = server, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._labels: list[str] = []
        """Names of the weights, by their policy version: tunix has whole numbers."""
        self.num_restarts = 0
        """Stays 0: a lost server ends the run."""

    @property
    def url(self) -> str:
        """Return the address of the server."""
        return self._server.url

    def __enter__(self) -> Self:
        self._server.__enter__()
        self._thread.start()
        self._sampler = TunixSampler(self.url)
        self._sampler.initialize()
        self._run(self._sampler.start())
        with BlockingRolloutClient(self.url) as client:
            self._layout = served_layout(client.model_info())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._sampler.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._server.__exit__(None, None, None)

    def serve(self, tensors: dict[str, np.ndarray], *, version: str, under_way: bool = False) -> float:
        """Have the server serve these weights by a weight sync; return the seconds that it took.

        Samples that are `under_way` are held meanwhile, as in every sync.
        """
        started, number = time.perf_counter(), len(self._labels)
        self._labels.append(version)
        sync = SimpleNamespace(
            policy_version=number, weights=tensors, extra_config={"req_id": f"round {number}", "uuid": version}
        )
        self._run(self._sync(sync))
        return time.perf_counter() - started

    async def _sync(self, sync: SimpleNamespace) -> None:
        await self._sampler.bind_weight_sync()
        await self._sampler.pre_weight_sync(sync)
        try:
            await self._sampler.weight_sync(sync)
        except BaseException:
            await self._sampler.abort_weight_sync(sync)
            raise
        await self._sampler.post_weight_sync(sync)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Return the samples of each request. Raises RuntimeError if a prompt has none."""
        asked = [self._requested(request, index) for request in requests for index in range(request.count)]
        answers = iter(self._run(self._answers(asked)))
        return [[self._rollout(each, index, next(answers)) for index in range(each.count)] for each in requests]

    async def _answers(self, requests: Sequence[SimpleNamespace]) -> list[SamplingResponse]:
        """Return the answers to requests; those that may succeed later are sent again."""
        answers = await self._sampler.sample(requests)
        for _ in range(MOST_TRIES):
            failed = [place for place, answer in enumerate(answers) if answer.error and answer.error.retryable]
            again = await self._sampler.sample([requests[place] for place in failed])
            for place, answer in zip(failed, again, strict=True):
                answers[place] = answer
        return answers

    def _requested(self, request: SampleRequest, index: int) -> SimpleNamespace:
        """Return a `SamplingRequest` of tunix for one sample."""
        params = SimpleNamespace(
            max_tokens=request.sampling["max_new_tokens"],
            temperature=request.sampling["temperature"],
            seed=(request.seed + index) % SEEDS,
            return_logprobs=True,
            return_routed_experts=True,
            routed_experts_prompt_start=request.rows_from,
        )
        return SimpleNamespace(request_id=request.prompt_id, prompt=list(request.prompt_ids), sampling_params=params)

    def _rollout(self, request: SampleRequest, index: int, answer: SamplingResponse) -> Rollout:
        """Return an answer of tunix as a sample; the last of its rows has no experts."""
        if answer.error is not None:
            raise RuntimeError(f"{request.prompt_id}: {answer.error.message}")
        assert answer.logprobs is not None and answer.routed_experts is not None, "both were requested"
        rows = answer.routed_experts[:-1, list(self._layout.layer_ids)]
        if (rows == UNSET).any():
            raise RuntimeError(f"{request.prompt_id}: rows are missing")
        version, start = self._labels[answer.metadata["policy_version"]], request.rows_from
        end = len(answer.prompt_token_ids) + len(answer.token_ids)
        labelled = ((start, start + len(rows), version),)
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.first + index,
            weight_version=version,
            seed=request.seed,
            prompt_ids=answer.prompt_token_ids,
            output_ids=answer.token_ids,
            logprobs=answer.logprobs,
            logprob_versions=((len(answer.prompt_token_ids), end, version),),
            text=answer.text,
            finish_reason=answer.finish_reason,
            routing=RoutedExperts(rows.astype(self._layout.dtype), start, weight_version=labelled),
            layout=self._layout,
        )

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
