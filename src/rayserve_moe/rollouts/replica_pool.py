"""The job's own engines in its Ray cluster: a replica per slice, in this process or in actors, replaced when lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.tpu import get_num_tpu_slices

from rayserve_moe.answers.native import native_answer
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.cluster.slice_placement import RAY_VERSIONS, GivenUpError
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.config.settings import Settings
from rayserve_moe.config.topology import slice_for
from rayserve_moe.engine.admission import EngineBusyError
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.inprocess.running import RunningRequest
from rayserve_moe.observability.logs import use_logging
from rayserve_moe.requests.builder import build_request, read_given
from rayserve_moe.requests.fields import SGLANG
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.rollouts.answers import Faulty, Layouts, Refused, SampleRequest, Unavailable, Unusable, rollout_of
from rayserve_moe.rollouts.schema import Rollout

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
PAUSE_BETWEEN_STARTS_S = 5.0
REPLICA_CPUS = 0.5
MAX_CALLS = 4096
MAX_STOP_S = 10.0
START_ERRORS = (RayError, OSError, ValueError)
"""Raised if an engine cannot be started: with these settings, on this cluster, or at present."""


def num_replicas_for(settings: Settings) -> int:
    """Return the number of replicas for the cluster's free slices; 1 on a CPU cluster. Raises Unusable if none fits."""
    cluster, parallel = settings.cluster, settings.parallel
    if not cluster.tpu_topology:
        return 1
    tpu = slice_for(cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)
    num_slices = get_num_tpu_slices(tpu.topology, f"TPU-{RAY_VERSIONS.get(tpu.version, tpu.version).upper()}")
    num_slices = min(num_slices, int(ray.available_resources().get("TPU", 0)) // tpu.num_chips)
    if num_slices < parallel.num_slices:
        raise Unusable(f"the cluster has {num_slices} free {tpu.version} slices of topology {tpu.topology}")
    return num_slices // parallel.num_slices


class ReplicaPool:
    """Several replicas behind a single interface. An async context manager; Ray must be running.

    A single replica over CPU hosts runs in this process, which has little else to do (`is_local`). Otherwise each
    replica has its own process, on a host of its slice.
    """

    def __init__(self, settings: Settings, num_replicas: int) -> None:
        self._settings, self._num_replicas = settings, num_replicas
        self.is_local = num_replicas == 1 and not settings.cluster.tpu_topology
        self._num_running: dict[Replica, int] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._changing: set[asyncio.Task[None]] = set()
        self._num_failed_starts, self._max_failed_starts = 0, MAX_FAILED_STARTS * num_replicas

    async def __aenter__(self) -> Self:
        """Start all replicas. Raises Unusable with the reason if a replica does not start."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_exit(self)
            self._changing = {asyncio.create_task(self._start()) for _ in range(self._num_replicas)}
            await asyncio.gather(*self._changing)
            undo.pop_all()
        self._changing.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._changing:
            task.cancel()
        await asyncio.gather(
            *self._changing, *(replica.stop() for replica in self._num_running), return_exceptions=True
        )

    async def model_info(self) -> dict[str, Any]:
        """Return the fields of `/model_info`; `max_running` counts samples over all replicas."""
        return {**self._facts, "max_running": self._facts["max_running"] * self._num_replicas}

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt like `generate_many`."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample on the replica with the fewest running samples. Raises Unusable if replicas keep dying."""
        replica, num_samples = await self._select_replica(), sum(request.count for request in requests)
        self._num_running[replica] += num_samples
        try:
            answers = await replica.generate_many(requests)
        except EngineStoppedError as error:
            self._replace(replica)
            raise Unavailable("an engine was lost") from error
        finally:
            if replica in self._num_running:
                self._num_running[replica] -= num_samples
        self._num_failed_starts = 0
        return answers

    async def _select_replica(self) -> Replica:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_running or not self._changing)
            if not self._num_running:
                raise Unusable("no replica is left: each was lost before it answered, or did not start")
            return min(self._num_running, key=lambda replica: self._num_running[replica])

    async def _start(self) -> None:
        replica = LocalReplica(self._settings) if self.is_local else ActorReplica(self._settings)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(replica.stop)
            try:
                self._facts = await replica.start()
            except START_ERRORS as error:
                raise Unusable(str(error)) from error
            undo.pop_all()
        async with self._changed:
            self._num_running[replica] = 0
            self._changed.notify_all()

    def _replace(self, replica: Replica) -> None:
        """Start a replacement of a lost replica, unless that was done already."""
        if self._num_running.pop(replica, None) is None:
            return
        self._num_failed_starts += 1
        log.warning("a replica was lost")
        self._changing.add(asyncio.get_running_loop().create_task(self._start_again(replica)))

    async def _start_again(self, lost: Replica) -> None:
        try:
            await lost.stop()
            while self._num_failed_starts <= self._max_failed_starts:
                if await self._has_started():
                    break
                await asyncio.sleep(PAUSE_BETWEEN_STARTS_S)
        finally:
            self._changing.discard(asyncio.current_task())
            async with self._changed:
                self._changed.notify_all()

    async def _has_started(self) -> bool:
        try:
            await self._start()
        except Unusable as error:
            self._num_failed_starts += 1
            log.warning("a replica did not start: %s", error)
            return False
        return True


class LocalReplica:
    """A replica in this process: engine thread and tokenizer; its workers are actors. `start` comes first."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._given_up = settings, threading.Event()
        self._starting: asyncio.Future[ReplicaEngine] | None = None
        self._engine: ReplicaEngine | None = None

    async def start(self) -> dict[str, Any]:
        """Reserve the slice and load the model; return the fields of `/model_info`, and `max_running`."""
        start = partial(start_replica_engine, self._settings, given_up=self._given_up)
        self._starting = asyncio.ensure_future(asyncio.to_thread(start))
        engine = await asyncio.shield(self._starting)
        self._engine, card = engine, engine.loop.card
        rows = self._settings.scheduler.max_running_requests * self._settings.parallel.data_parallel_size
        return {
            "model_path": card.path,
            "served_model_name": card.name,
            "weight_version": card.weight_version,
            "enable_return_routed_experts": card.returns_routing,
            "enable_return_indexer_topk": card.index is not None,
            "enable_return_router_gates": card.gates is not None,
            "max_running": rows,
        }

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample prompts. Raises Refused, Unavailable, Faulty, or EngineStoppedError once the engine is lost."""
        outcomes = await asyncio.gather(*map(self._generate, requests), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def stop(self) -> None:
        """Abort running requests and release the slice. May be called twice. Raises nothing."""
        self._given_up.set()
        if self._starting is not None:
            with contextlib.suppress(GivenUpError, *START_ERRORS):
                await asyncio.to_thread((await self._starting).shutdown)

    async def _generate(self, request: SampleRequest) -> list[Rollout]:
        assert self._engine is not None, "start comes first"
        loop, started_at = self._engine.loop, time.time()
        try:
            running = RunningRequest(loop, self._engine.tokenizer, request=self._request_of(request))
        except RequestError as error:
            raise Refused(str(error)) from error
        except EngineBusyError as error:
            raise Unavailable("the engine is busy") from error
        await running.wait_async()
        for result in running.results:
            if result.finish is not None and result.finish.kind == "error":
                loop.check_health()
                raise Faulty(result.finish.message or "the model failed on this request")
        return [
            rollout_of(
                _answer_of(running, result, card=loop.card),
                request,
                index=index,
                routing=result.routing,
                layouts=Layouts(loop.card.routing, loop.card.index, loop.card.gates),
                started_at=started_at,
            )
            for index, result in enumerate(running.results)
        ]

    def _request_of(self, request: SampleRequest) -> GenerationRequest:
        """Return the engine's request for the same samples."""
        assert self._engine is not None, "start comes first"
        prompt_ids, card = np.asarray(request.prompt_ids, np.int32), self._engine.loop.card
        given = {**read_given(request.all_sampling), **request.returned}
        return build_request(prompt_ids, given, dialect=SGLANG, card=card)


def _answer_of(running: RunningRequest, result: ChoiceResult, *, card: ModelCard) -> dict[str, Any]:
    """Return the native answer of a choice, with its arrays as fields."""
    arrays: dict[str, np.ndarray] = {}
    answer = native_answer(
        running.request, result, card=card, e2e_latency_s=running.elapsed_s, return_logprob=True, arrays=arrays
    )
    return answer | arrays


class ReplicaProcess(LocalReplica):
    """A replica with its own process."""

    async def start(self) -> dict[str, Any]:
        use_logging(self._settings.logging)
        facts = await super().start()
        freeze_what_stays()
        return facts


RemoteReplicaProcess = ray.remote(ReplicaProcess)


class ActorReplica:
    """A replica in an actor, with the methods of `LocalReplica`."""

    def __init__(self, settings: Settings) -> None:
        actor_class = RemoteReplicaProcess.options(num_cpus=REPLICA_CPUS, max_concurrency=MAX_CALLS)
        self._actor = cast(ActorHandle, actor_class.remote(settings))

    async def start(self) -> dict[str, Any]:
        return await self._actor.start.remote()

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        try:
            return await self._actor.generate_many.remote(requests)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise EngineStoppedError("the process of a replica was lost") from error

    async def stop(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.stop.remote(), MAX_STOP_S)
        ray.kill(self._actor)


Replica = LocalReplica | ActorReplica
