"""Engines of the job's own in its Ray cluster, as many as there are slices; one that is lost is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.util.tpu import get_num_tpu_slices

from rayserve_moe.cluster.slice_placement import RAY_VERSIONS
from rayserve_moe.config.settings import Settings
from rayserve_moe.config.topology import slice_for
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.rollouts.answers import SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.replicas import START_ERRORS, ActorReplica, LocalReplica, Replica
from rayserve_moe.rollouts.schema import Rollout

log = logging.getLogger(__name__)

MOST_STARTS_IN_VAIN = 3
PAUSE_BETWEEN_STARTS_S = 5.0


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
    """Several replicas as one that answers. An async context manager; Ray must be running.

    A single one over CPU hosts runs in this process, which has little else to do (`is_local`). Otherwise each has a
    process of its own, on a host of its slice.
    """

    def __init__(self, settings: Settings, num_replicas: int) -> None:
        self._settings, self._num_replicas = settings, num_replicas
        self.is_local = num_replicas == 1 and not settings.cluster.tpu_topology
        self._num_running: dict[Replica, int] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._changing: set[asyncio.Task[None]] = set()
        self._num_starts_in_vain, self._most_starts_in_vain = 0, MOST_STARTS_IN_VAIN * num_replicas

    async def __aenter__(self) -> Self:
        """Start all replicas. Unusable says why one did not start."""
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
        """As `/model_info` of a server; `max_running` counts samples over all replicas."""
        return {**self._facts, "max_running": self._facts["max_running"] * self._num_replicas}

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt, as `generate_many` does."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample on the replica with the fewest running samples. Unusable where replicas die as fast as they start."""
        replica, num_samples = await self._least_busy(), sum(request.count for request in requests)
        self._num_running[replica] += num_samples
        try:
            answers = await replica.generate_many(requests)
        except EngineStoppedError as error:
            self._replace(replica)
            raise Unavailable("an engine was lost") from error
        finally:
            if replica in self._num_running:
                self._num_running[replica] -= num_samples
        self._num_starts_in_vain = 0
        return answers

    async def _least_busy(self) -> Replica:
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
        """Start another in the place of a lost one, unless that was done already."""
        if self._num_running.pop(replica, None) is None:
            return
        self._num_starts_in_vain += 1
        log.warning("a replica was lost")
        self._changing.add(asyncio.get_running_loop().create_task(self._start_again(replica)))

    async def _start_again(self, lost: Replica) -> None:
        try:
            await lost.stop()
            while self._num_starts_in_vain <= self._most_starts_in_vain:
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
            self._num_starts_in_vain += 1
            log.warning("a replica did not start: %s", error)
            return False
        return True
