"""One engine of the job's own over one slice of its Ray cluster: in the job's process, or in an actor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rayserve_moe.answers.native import native_answer
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.cluster.slice_placement import GivenUpError
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.config.settings import Settings
from rayserve_moe.engine.admission import EngineBusyError
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.inprocess.running import RunningRequest
from rayserve_moe.observability.logs import use_logging
from rayserve_moe.requests.builder import build_request, read_given
from rayserve_moe.requests.fields import SGLANG
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, rollout_of
from rayserve_moe.rollouts.schema import Rollout

REPLICA_CPUS = 0.5
MOST_CALLS = 4096
LONGEST_STOP_S = 10.0
START_ERRORS = (RayError, OSError, ValueError)
"""Raised where an engine cannot be started: with these settings, on this cluster, or at present."""


class LocalReplica:
    """A replica in this process: engine thread and tokenizer; its workers are actors. `start` comes first."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._given_up = settings, threading.Event()
        self._starting: asyncio.Future[ReplicaEngine] | None = None
        self._engine: ReplicaEngine | None = None

    async def start(self) -> dict[str, Any]:
        """Reserve the slice and load the model; returns the fields of `/model_info`, and `max_running`."""
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
            "max_running": rows,
        }

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample prompts. Raises Refused, Unavailable, Faulty, and EngineStoppedError once the engine is lost."""
        outcomes = await asyncio.gather(*map(self._generate, requests), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def stop(self) -> None:
        """Abort what runs and give the slice back; may be called twice. Raises nothing."""
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
        asked, elapsed_s = running.request, running.elapsed_s
        return [
            rollout_of(
                native_answer(asked, result, card=loop.card, e2e_latency_s=elapsed_s, return_logprob=True),
                request,
                index=index,
                routing=result.routing,
                layout=loop.card.routing,
                started_at=started_at,
            )
            for index, result in enumerate(running.results)
        ]

    def _request_of(self, request: SampleRequest) -> GenerationRequest:
        """The engine's request for the same samples."""
        assert self._engine is not None, "start comes first"
        prompt_ids, card = np.asarray(request.prompt_ids, np.int32), self._engine.loop.card
        given = {**read_given(request.all_sampling), "return_routed_experts": request.returns_routing}
        return build_request(prompt_ids, given, dialect=SGLANG, card=card)


class ReplicaProcess(LocalReplica):
    """A replica with a process of its own."""

    async def start(self) -> dict[str, Any]:
        use_logging(self._settings.logging)
        facts = await super().start()
        freeze_what_stays()
        return facts


RemoteReplicaProcess = ray.remote(ReplicaProcess)


class ActorReplica:
    """A replica in an actor: the methods of `LocalReplica`."""

    def __init__(self, settings: Settings) -> None:
        options = {"num_cpus": REPLICA_CPUS, "max_concurrency": MOST_CALLS}
        self._actor = cast(ActorHandle, RemoteReplicaProcess.options(**options).remote(settings))

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
            await asyncio.wait_for(self._actor.stop.remote(), LONGEST_STOP_S)
        ray.kill(self._actor)


Replica = LocalReplica | ActorReplica
