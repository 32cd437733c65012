"""The public engine of this process: a model, its engine thread, and text in and out, without Ray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.config.load import default_cache_directory, settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.engine.answers import ChoiceResult, native_answer
from rayserve_moe.engine.engine_loop import EngineLoop, LoopSettings
from rayserve_moe.engine.streams import open_stream
from rayserve_moe.execution.card import model_card
from rayserve_moe.execution.host_runner import HostRunner, RunnerSettings
from rayserve_moe.inprocess.arguments import prompts_from, requests_from, single_prompt_from
from rayserve_moe.inprocess.local_executor import LocalExecutor
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import local_devices, plan_for
from rayserve_moe.requests import GenerationRequest
from rayserve_moe.text.choice_text import ChoiceDelta
from rayserve_moe.text.tokenizer import Tokenizer

Answer = dict[str, Any]


class Engine:
    """Serves one model from this process.

    Keyword arguments are the settings of `config.settings` under their flat names, for example
    `Engine(model_path=..., enable_return_routed_experts=True, devices_per_host=2)`. SettingsError and CheckpointError
    say what is wrong with them. Use it as a context manager, or call `shutdown`.
    """

    def __init__(self, model_path: str, **settings: Any) -> None:
        wanted = settings_from({"model_path": model_path, **settings})
        if wanted.parallel.num_hosts != 1:
            raise SettingsError("num_hosts must be 1 in one process; several hosts need Ray (serve run)")
        path = resolve_model_path(wanted.model.path, cache_directory=default_cache_directory())
        model = dataclasses.replace(wanted.model, path=str(path))
        self.tokenizer = Tokenizer(path)
        self.card = model_card(
            spec_from_config(read_config(path)),
            model=model,
            replay=wanted.replay,
            name=path.name,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        runner_settings = RunnerSettings(
            model,
            wanted.scheduler,
            wanted.cache,
            wanted.replay,
            wanted.experts,
            wanted.compile,
            wanted.balancing,
        )
        parallel = wanted.parallel
        data_size, num_slices = parallel.data_parallel_size, parallel.num_slices
        plan = plan_for(local_devices(parallel.devices_per_host), data_size=data_size, num_slices=num_slices)
        self.runner = HostRunner(runner_settings, plan)
        self.loop = EngineLoop(
            LocalExecutor(self.runner),
            self.card,
            settings=LoopSettings(wanted.scheduler, wanted.cache, data_size, balancing=wanted.balancing),
        )

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        return_logprob: bool = False,
        return_routed_experts: bool = False,
        **sampling: Any,
    ) -> Answer | list[Answer]:
        """Complete one prompt or a batch of them and wait for all.

        Give `prompt` (text) or `input_ids`; one of either gives one answer (a list of n where n > 1), a batch gives a
        list in its order, under a progress bar where there is a terminal. `sampling_params` are SGLang's
        (`max_new_tokens`, `temperature`, `n`, ...), one mapping for all or one each; keywords apply to all. Answers
        are those of `POST /generate`. RequestError names what cannot be served.
        """
        prompts, is_batch = prompts_from(self.tokenizer, prompt, input_ids=input_ids)
        requests = requests_from(
            prompts, sampling_params, keywords=sampling, return_routed_experts=return_routed_experts
        )
        answers: list[Answer] = []
        with ExitStack() as cleanup:
            running = [_Running(self, request, return_logprob=return_logprob) for request in requests]
            for one in running:
                cleanup.callback(one.stream.close)
            for one in tqdm(running, disable=None if len(running) > 1 else True, unit="request"):
                for delta in one.stream:
                    one.add(delta)
                answers += one.answers()
        return answers if is_batch or len(answers) > 1 else answers[0]

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        return_logprob: bool = False,
        return_routed_experts: bool = False,
        **sampling: Any,
    ) -> Iterator[Answer]:
        """Complete one prompt; yields the whole answer so far, with its `index`, whenever a choice has grown."""
        prompts = [single_prompt_from(self.tokenizer, prompt, input_ids=input_ids)]
        (request,) = requests_from(
            prompts, sampling_params, keywords=sampling, return_routed_experts=return_routed_experts, streams=True
        )
        running = _Running(self, request, return_logprob=return_logprob)
        try:
            for delta in running.stream:
                yield running.add(delta)
        finally:
            running.stream.close()

    async def async_generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        return_logprob: bool = False,
        return_routed_experts: bool = False,
        **sampling: Any,
    ) -> Answer | list[Answer]:
        """Complete one prompt without blocking the event loop; a list of n answers where n > 1."""
        prompts = [single_prompt_from(self.tokenizer, prompt, input_ids=input_ids)]
        (request,) = requests_from(
            prompts, sampling_params, keywords=sampling, return_routed_experts=return_routed_experts
        )
        running = _Running(self, request, return_logprob=return_logprob)
        try:
            async for delta in running.stream:
                running.add(delta)
        finally:
            running.stream.close()
        answers = running.answers()
        return answers if len(answers) > 1 else answers[0]

    def shutdown(self) -> None:
        """Abort what runs and stop the engine thread. May be called twice."""
        self.loop.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Running:
    """A submitted request and what its choices have come to."""

    def __init__(self, engine: Engine, request: GenerationRequest, *, return_logprob: bool) -> None:
        self._started = time.perf_counter()
        self._card, self._request, self._return_logprob = engine.card, request, return_logprob
        self._results = [ChoiceResult() for _ in range(request.sampling.n)]
        self.stream = open_stream(engine.loop, engine.tokenizer, request=request)

    def add(self, delta: ChoiceDelta) -> Answer:
        """Take in a delta; returns the answer so far of the choice it belongs to."""
        self._results[delta.choice_index].add(delta)
        return {**self._answer(delta.choice_index), "index": delta.choice_index}

    def answers(self) -> list[Answer]:
        return [self._answer(index) for index in range(len(self._results))]

    def _answer(self, index: int) -> Answer:
        return native_answer(
            self._request,
            self._results[index],
            card=self._card,
            e2e_latency_s=time.perf_counter() - self._started,
            return_logprob=self._return_logprob,
        )
