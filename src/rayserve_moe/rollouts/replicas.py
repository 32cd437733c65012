"""Engines of the job's own in its Ray cluster: an actor per replica, each with a slice, replaced when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.tpu import get_num_tpu_slices

from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.cluster.slice_placement import RAY_VERSIONS
from rayserve_moe.config.settings import Settings
from rayserve_moe.config.topology import slice_for
from rayserve_moe.engine.answers import native_fields
from rayserve_moe.engine.engine_loop import EngineBusyError
from rayserve_moe.engine.inbox import EngineStoppedError
from rayserve_moe.inprocess.arguments import sampling_from
from rayserve_moe.inprocess.running import RunningRequest
from rayserve_moe.requests import GenerationRequest, RequestError
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable, rollout_of
from rayserve_moe.rollouts.schema import Rollout

log = logging.getLogger(__name__)

REPLICA_CPUS = 0.5
MOST_CALLS = 4096
MOST_STARTS_IN_VAIN = 3
PAUSE_BETWEEN_STARTS_S, LONGEST_STOP_S = 5.0, 10.0


class EngineReplica:
    """One engine over one slice, asked for many prompts at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: ReplicaEngine | None = None

    async def start(self) -> dict[str, Any]:
        """Reserve the slice and load the model; returns what `/model_info` tells, and how much runs at once."""
        engine = await asyncio.to_thread(start_replica_engine, self._settings)
        self._engine, card = engine, engine.loop.card
        rows = self._settings.scheduler.max_running_requests * self._settings.parallel.data_parallel_size
        return {
            "model_path": card.path,
            "served_model_name": card.name,
            "weight_version": card.weight_version,
            "enable_return_routed_experts": card.returns_routing,
            "max_running": rows,
        }

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt. Raises Refused, Unavailable, Faulty, and EngineStoppedError once the engine is lost."""
        assert self._engine is not None, "start comes first"
        loop, started_at = self._engine.loop, time.time()
        try:
            running = RunningRequest(loop, self._engine.tokenizer, request=_request_of(request))
        except RequestError as error:
            raise Refused(str(error)) from error
        except EngineBusyError as error:
            raise Unavailable("the engine is busy") from error
        await running.wait_async()
        for result in running.results:
            if result.finish is not None and result.finish.kind == "error":
                loop.check_health()
                raise Faulty(result.finish.message or "the model failed on this request")
        asked, elapsed_s = running.request, running.elapsed_s
        return [
            rollout_of(
                native_fields(asked, result, card=loop.card, e2e_latency_s=elapsed_s, return_logprob=True),
                request,
                index=index,
                routing=result.routing,
                layout=loop.card.routing,
                started_at=started_at,
            )
            for index, result in enumerate(running.results)
        ]

    def stop(self) -> None:
        """Abort what runs and give the slice back."""
        if self._engine is not None:
            self._engine.loop.shutdown()


RemoteEngineReplica = ray.remote(EngineReplica)


def _request_of(request: SampleRequest) -> GenerationRequest:
    """Ask the engine for the same samples."""
    numbers = {"n": request.count, "sampling_seed": request.seed, "first_choice": request.first}
    sampling = sampling_from({**request.sampling, **numbers})
    return GenerationRequest(
        uuid.uuid4().hex,
        np.asarray(request.prompt_ids, np.int32),
        sampling,
        return_routed_experts=request.returns_routing,
        incremental=bool(sampling.stop),
    )


def num_replicas_for(settings: Settings) -> int:
    """As many as the cluster has free slices for; one on a CPU cluster. Unusable where they do not do for one."""
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
    """Several replicas as one that answers. An async context manager; Ray must be running."""

    def __init__(self, settings: Settings, num_replicas: int) -> None:
        self._settings, self._num_replicas = settings, num_replicas
        self._num_running: dict[ActorHandle, int] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._starting: set[asyncio.Task[None]] = set()
        self._num_starts_in_vain = 0

    async def __aenter__(self) -> Self:
        """Start all replicas. Raises what stands in the way of any."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_exit(self)
            await asyncio.gather(*(self._start() for _ in range(self._num_replicas)))
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._starting:
            task.cancel()
        stopping = [asyncio.wait_for(actor.stop.remote(), LONGEST_STOP_S) for actor in self._num_running]
        await asyncio.gather(*stopping, return_exceptions=True)
        for actor in self._num_running:
            ray.kill(actor)

    async def model_info(self) -> dict[str, Any]:
        """As a server tells it; `max_running` counts samples over all replicas."""
        return {**self._facts, "max_running": self._facts["max_running"] * self._num_replicas}

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Have the replica sample that has least to do. Unusable where replicas die as fast as they start."""
        actor = await self._least_busy()
        self._num_running[actor] += request.count
        try:
            rollouts = await actor.generate.remote(request)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineStoppedError):
                self._replace(actor)
                raise Unavailable("an engine was lost") from cause
            raise cause from None
        except RayActorError as error:
            self._replace(actor)
            raise Unavailable("a replica was lost") from error
        finally:
            if actor in self._num_running:
                self._num_running[actor] -= request.count
        self._num_starts_in_vain = 0
        return rollouts

    async def _least_busy(self) -> ActorHandle:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_running or not self._starting)
            if not self._num_running:
                raise Unusable("no replica is left: each was lost before it answered, or did not start")
            return min(self._num_running, key=lambda actor: self._num_running[actor])

    async def _start(self) -> None:
        options = {"num_cpus": REPLICA_CPUS, "max_concurrency": MOST_CALLS}
        actor = cast(ActorHandle, RemoteEngineReplica.options(**options).remote(self._settings))
        with contextlib.ExitStack() as undo:
            undo.callback(ray.kill, actor)
            self._facts = await actor.start.remote()
            undo.pop_all()
        async with self._changed:
            self._num_running[actor] = 0
            self._changed.notify_all()

    def _replace(self, actor: ActorHandle) -> None:
        """Bring up another in the place of a lost one, unless that was seen to already."""
        if self._num_running.pop(actor, None) is None:
            return
        ray.kill(actor)
        self._num_starts_in_vain += 1
        log.warning("a replica was lost")
        self._starting.add(asyncio.get_running_loop().create_task(self._start_again()))

    async def _start_again(self) -> None:
        while self._num_starts_in_vain <= MOST_STARTS_IN_VAIN * self._num_replicas:
            try:
                await self._start()
                break
            except (RayTaskError, RayActorError) as error:
                self._num_starts_in_vain += 1
                log.warning("a replica did not start: %s", error)
                await asyncio.sleep(PAUSE_BETWEEN_STARTS_S)
        async with self._changed:
            self._starting.discard(asyncio.current_task())
            self._changed.notify_all()
