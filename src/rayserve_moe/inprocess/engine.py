"""Public in-process engine: a model with its engine thread, and text in and out, without Ray.

Its executor runs steps in this process.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from rayserve_moe.answers.native import index_fields, native_answer, native_routing
from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER, adapter_body
from rayserve_moe.checkpoints.bucket import (
    Heads,
    SentAdapter,
    SentShares,
    SentTensor,
    WantedTensor,
    cut,
    read_bucket,
)
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.model_path import located
from rayserve_moe.config.derive import server_platform
from rayserve_moe.config.given_files import is_url, one_line
from rayserve_moe.config.load import default_cache_directory, settings_from
from rayserve_moe.config.settings import SettingsError, UpdateSettings
from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.guides import constraint_compiler
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.updates.adapters import adapter_order, load_fault, unload_fault
from rayserve_moe.execution.card import describe_model
from rayserve_moe.execution.page_store import PageStore
from rayserve_moe.execution.platforms import devices_for, limit_threads
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights.adapters import HostAdapters
from rayserve_moe.execution.weights.staged import WeightReading, refusing, too_late
from rayserve_moe.execution.weights.tensor_staging import TensorStaging
from rayserve_moe.inprocess.arguments import INDEX_FORM, Prompts, prompts_from, requests_from, single_prompt_from
from rayserve_moe.inprocess.running import RunningRequest, run_to_end
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.replay.encoding import INDEX_FORMS
from rayserve_moe.requests.records import ModelCard, RequestError, WeightsRefusedError
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult

Answer = dict[str, Any]
SamplingMappings = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class Engine:
    """Engine that serves a model from this process.

    Keyword arguments are the settings of `config.settings` under their flat names, for example `Engine(model_path=...,
    enable_return_routed_experts=True, devices_per_host=2)`. Use it as a context manager, or call `shutdown`.

    Raises: SettingsError for wrong settings, CheckpointError for an unusable checkpoint.
    """

    def __init__(self, model_path: str, **settings: Any) -> None:
        wanted = settings_from({"model_path": model_path, **settings})
        if wanted.parallel.num_hosts != 1:
            raise SettingsError("num_hosts must be 1 in one process; several hosts need Ray (serve run)")
        described = describe_model(wanted)  # before a device is taken, so that an invalid model takes none
        if server_platform(wanted.cluster) == "cpu" and not is_url(path := described.runner.model.path):
            limit_threads(path)
        parallel, platform = wanted.parallel, wanted.cluster.platform
        devices = devices_for(parallel.devices_per_host, wanted=platform)
        wanted = settings_from({"model_path": model_path, **settings}, on_tpu=devices[0].platform == "tpu")
        described = describe_model(wanted)
        plan = plan_for(
            devices,
            data_size=parallel.data_parallel_size,
            num_slices=parallel.num_slices,
        )
        self.tokenizer = described.tokenizer
        self.runner = HostRunner(described.runner, plan)
        executor = LocalExecutor(self.runner, wanted.updates)
        constraints = constraint_compiler(self.tokenizer, described.card, settings=wanted.structured)
        self.loop = EngineLoop(executor, described.card, settings=wanted, constraints=constraints)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingMappings = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **keywords: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """Complete a prompt or a batch and return all answers; with `stream`, act as `generate_stream`.

        Give `prompt` (text) or `input_ids`. A single prompt returns an answer (a list of n if n > 1); a batch returns a
        list in its order and shows a progress bar on a terminal. `sampling_params` are SGLang's (`max_new_tokens`,
        `temperature`, `n`, ...), a mapping for all or one each. Keywords apply to all: sampling parameters, and the
        options of `inprocess.arguments.requests_from`. Answers have the form of `POST /generate`.

        Raises: RequestError if a request is invalid or unsupported.
        """
        if stream:
            return self._streamed(prompts_from(self.tokenizer, prompt, input_ids=input_ids), sampling_params, keywords)
        prompts = prompts_from(self.tokenizer, prompt, input_ids=input_ids)
        requests = requests_from(prompts, sampling_params, keywords=keywords, card=self.card)
        finished = run_to_end(self.loop, self.tokenizer, requests=requests, shows_progress=True)
        answers = [answer for one in finished for answer in self._answers(one, keywords)]
        return answers if prompts.is_batch or len(answers) > 1 else answers[0]

    def generate_stream(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        **keywords: Any,
    ) -> Iterator[Answer]:
        """Complete a prompt like `generate`; yield the accumulated answer and its `index` whenever a choice grows."""
        return self._streamed(prompts_from(self.tokenizer, prompt, input_ids=input_ids), sampling_params, keywords)

    async def async_generate(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        stream: bool = False,
        **keywords: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """Complete a prompt like `generate`, without blocking the event loop; return a list of n answers if n > 1.

        With `stream`, return an async iterator with the items of `generate_stream`.
        """
        prompts = single_prompt_from(self.tokenizer, prompt, input_ids=input_ids)
        (request,) = requests_from(prompts, sampling_params, keywords=keywords, card=self.card, streams=stream)
        running = RunningRequest(self.loop, self.tokenizer, request=request)
        if stream:
            return self._async_streamed(running, keywords)
        await running.wait_async()
        answers = self._answers(running, keywords)
        return answers if len(answers) > 1 else answers[0]

    @property
    def card(self) -> ModelCard:
        """Return the served model with the current version of its weights."""
        return self.loop.card

    def pause_generation(self, mode: str = "abort") -> None:
        """Run no steps until `continue_generation`; return when no step is in flight.

        `abort` ends all requests, `retract` preempts them for recomputation, `in_place` keeps them unchanged.

        Raises: RequestError for an unknown mode.
        """
        self.loop.control.pause(mode).result()

    def continue_generation(self) -> None:
        """End a pause, if any."""
        self.loop.control.resume().result()

    def update_weights_from_disk(
        self, model_path: str | Path, *, weight_version: str | None = None, abort_all_requests: bool = False
    ) -> WeightOutcome:
        """Load the weights of another checkpoint of the same model; return whether that succeeded, or the reason.

        Running requests continue under the new weights unless `abort_all_requests`. The prefix cache is flushed. The
        default `weight_version` is the next number.
        """
        path = located(str(model_path), cache_directory=default_cache_directory())
        path = path if is_url(path) else str(Path(path).absolute())
        order = WeightOrder(path, weight_version, aborts_requests=abort_all_requests)
        return self.loop.control.update_weights(order).result()

    def load_lora_adapter(
        self,
        lora_path: str | Path,
        *,
        lora_name: str = "",
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        merge: bool = False,
    ) -> WeightOutcome:
        """Load the LoRA adapter of a directory, under a name that is the model's by default.

        With `max_loras`, requests name it by `lora_path`, beside others. Otherwise, or to `merge`, it is merged into
        the configured checkpoint, in place of any other. Returns like `update_weights_from_disk`.
        """
        loads = None if merge else self.loop.control.adapters
        if loads is None and (fault := load_fault(self.loop.control.adapter)):
            return WeightOutcome(False, fault, self.card.weight_version)
        path = str(Path(lora_path).absolute())
        try:
            body = adapter_body(path)
        except CheckpointError as error:
            return WeightOutcome(False, one_line(str(error)), self.card.weight_version)
        if loads is not None:
            adapter = read_bucket(body)
            assert isinstance(adapter, SentAdapter), "the body of an adapter"
            return loads.load(adapter, lora_name or self.card.name, path=path).result()
        order = adapter_order(
            lora_name or self.card.name, weight_version=weight_version, aborts_requests=abort_all_requests
        )
        return self.loop.control.tensors.stage(read_bucket(body), order).result()

    def unload_lora_adapter(self, lora_name: str = "", *, weight_version: str | None = None) -> WeightOutcome:
        """Unload the adapter of a name; if it is merged, restore the configured checkpoint to the bit."""
        loads = self.loop.control.adapters
        if loads is not None and (lora_name or self.card.name) in loads.table.current:
            return loads.unload(lora_name or self.card.name).result()
        if fault := unload_fault(self.loop.control.adapter, lora_name or self.card.name):
            return WeightOutcome(False, fault, self.card.weight_version)
        order = adapter_order("", weight_version=weight_version)
        return self.loop.control.tensors.stage(read_bucket(NO_ADAPTER), order).result()

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Abort the requests with this `rid`, or all: they keep their tokens and end with the reason `abort`."""
        if abort_all:
            self.loop.abort_all()
        elif rid:
            self.loop.abort_stem(rid)

    def flush_cache(self) -> bool:
        """Flush the prefix cache and return True; while requests run, return False without a flush."""
        return self.loop.control.flush().result()

    def shutdown(self) -> None:
        """Abort running requests and stop the engine thread. May be called twice."""
        self.loop.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _streamed(
        self, prompts: Prompts, sampling_params: SamplingMappings, keywords: Mapping[str, Any]
    ) -> Iterator[Answer]:
        if prompts.is_batch:
            raise RequestError("one prompt at a time here; generate without stream takes batches", "prompt")
        (request,) = requests_from(prompts, sampling_params, keywords=keywords, card=self.card, streams=True)
        running = RunningRequest(self.loop, self.tokenizer, request=request)
        try:
            for delta in running.stream:
                yield self._grown(running, delta, keywords)
        finally:
            running.stream.close()

    async def _async_streamed(self, running: RunningRequest, keywords: Mapping[str, Any]) -> AsyncIterator[Answer]:
        try:
            async for delta in running.stream:
                yield self._grown(running, delta, keywords)
        finally:
            running.stream.close()

    def _grown(self, running: RunningRequest, delta: ChoiceResult, keywords: Mapping[str, Any]) -> Answer:
        index = delta.choice_index
        running.results[index].add(delta)
        running.record_time()
        return {**self._answer(running, index, keywords=keywords), "index": index}

    def _answers(self, running: RunningRequest, keywords: Mapping[str, Any]) -> list[Answer]:
        return [self._answer(running, index, keywords=keywords) for index in range(len(running.results))]

    def _answer(self, running: RunningRequest, index: int, *, keywords: Mapping[str, Any]) -> Answer:
        request, result = running.request, running.results[index]
        answer = native_answer(
            request,
            result,
            card=self.card,
            e2e_latency_s=running.elapsed_s,
            return_logprob=bool(keywords.get("return_logprob")),
        )
        answer["meta_info"] |= native_routing(request, result, card=self.card)
        form = keywords.get(INDEX_FORM) or INDEX_FORMS[0]
        answer["meta_info"] |= index_fields(request, result, layout=self.card.index, form=form)
        return answer


class LocalTensors:
    """Tensor staging within this process; implements `engine.executor.TensorReceiver`."""

    def __init__(self, staging: TensorStaging) -> None:
        self._staging = staging

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        self._staging.begin(expert_of_slot)

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        wanted = self._staging.wanted([(tensor.name, tensor.shape) for tensor in tensors])
        for tensor, share in zip(tensors, wanted, strict=True):
            with refusing():
                pieces = cut(tensor, share)
            self._staging.add(pieces)

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        return [self._staging.wanted(heads)]

    def stage_shares(self, shares: SentShares) -> None:
        """Stage shares, which are the pieces themselves in a single process."""
        (pieces,) = shares.by_host
        self._staging.add([piece.as_typed() for piece in pieces])

    def merge(self, adapter: SentAdapter) -> float:
        self._staging.merge(adapter.body, threading.Event())
        return self._staging.max_rounding

    def finish(self) -> None:
        self._staging.finish(threading.Event())

    def keep(self) -> None:
        """Do nothing: no weights outlive this process."""

    def drop(self) -> None:
        self._staging.drop()


class LocalAdapters:
    """Adapters within this process; implements `engine.executor.AdapterHosts`."""

    def __init__(self, held: HostAdapters) -> None:
        self._held = held

    def add(self, key: str, adapter: SentAdapter) -> None:
        self._held.add(key, adapter.body)

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._held.remove(key)


class LocalExecutor:
    """Executor with a single HostRunner; implements `engine.cycle.Executor`."""

    def __init__(self, runner: HostRunner, updates: UpdateSettings | None = None) -> None:
        self.runner = runner
        self.tensors, self._held = LocalTensors(runner.tensors), runner.adapters
        self._reading, self._updates = WeightReading(runner.staged), updates or UpdateSettings()

    def start(self) -> StartReport:
        return self.runner.prepare(self.runner.load())

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self.runner.execute(plan)

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self._reading.begin(model_path, expert_of_slot)
        refusal = self._reading.outcome(self._updates.staging_timeout_s)
        if refusal is None:
            self._reading.give_up()
            raise too_late(self._updates.staging_timeout_s)
        if refusal:
            raise WeightsRefusedError(refusal)

    @property
    def adapters(self) -> LocalAdapters:
        assert self._held is not None, "a server with max_loras holds adapters"
        return LocalAdapters(self._held)

    @property
    def pages(self) -> PageStore:
        assert self.runner.pages is not None, "a server with host_cache_mib keeps pages"
        return self.runner.pages

    def release(self) -> None:
        """Do nothing: this executor is idle between steps."""

    def shutdown(self) -> None:
        self._reading.give_up()
        if self.runner.later is not None:
            self.runner.later.stop()
