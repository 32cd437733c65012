"""Replicas that are lost, or do not start; and where they live."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import Settings
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.rollouts import replica_pool
from rayserve_moe.rollouts.answers import SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.replica_pool import ReplicaPool
from rayserve_moe.rollouts.schema import Rollout

CPU = {"model_path": "any"}
SLICE = {**CPU, "tpu_topology": "2x2", "tpu_version": "v6e", "devices_per_host": 4}


class Scripted:
    """Does what its script says; all of them that were made are in `made`."""

    made: list[Scripted]
    fails_to_start: Callable[[int], bool]
    is_lost: Callable[[int], bool]

    def __init__(self, _: Settings) -> None:
        self.number = len(self.made)
        self.is_running, self.num_asked = False, 0
        self.made.append(self)

    async def start(self) -> dict[str, Any]:
        self.is_running = True
        await asyncio.sleep(0.001 * self.number)
        if type(self).fails_to_start(self.number):
            raise ValueError(f"replica {self.number} has no weights")
        return {"max_running": 4}

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        self.num_asked += 1
        await asyncio.sleep(0.001)
        if type(self).is_lost(self.number):
            raise EngineStoppedError("gone")
        return [[] for _ in requests]

    async def stop(self) -> None:
        self.is_running = False


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    Scripted.made, Scripted.fails_to_start, Scripted.is_lost = [], lambda _: False, lambda _: False
    for name in ("LocalReplica", "ActorReplica"):
        monkeypatch.setattr(replica_pool, name, Scripted)
    monkeypatch.setattr(replica_pool, "PAUSE_BETWEEN_STARTS_S", 0.001)
    return Scripted


def pool(count: int) -> ReplicaPool:
    return ReplicaPool(settings_from(CPU), count)


@pytest.mark.parametrize(("settings", "count", "is_local"), [(CPU, 1, True), (CPU, 2, False), (SLICE, 1, False)])
def test_only_a_single_replica_on_cpu_hosts_lives_here(settings: dict, count: int, is_local: bool) -> None:
    assert ReplicaPool(settings_from(settings), count).is_local == is_local


def test_where_one_does_not_start_none_stays(scripted: type[Scripted]) -> None:
    scripted.fails_to_start = lambda number: number == 1

    async def enter() -> None:
        async with pool(3):
            pass

    with pytest.raises(Unusable, match="replica 1 has no weights"):
        asyncio.run(enter())
    assert len(scripted.made) == 3 and not any(replica.is_running for replica in scripted.made)


def test_work_goes_to_whoever_has_least() -> None:
    async def drive() -> None:
        async with pool(3) as three:
            assert (await three.model_info())["max_running"] == 12
            await asyncio.gather(*(three.generate(SampleRequest("p", [5], {}, 0)) for _ in range(9)))

    asyncio.run(drive())
    assert [replica.num_asked for replica in Scripted.made] == [3, 3, 3]


def test_a_lost_replica_is_stopped_and_another_takes_its_place(scripted: type[Scripted]) -> None:
    """Even where the next one does not start at once."""
    scripted.is_lost = lambda number: number == 0
    scripted.fails_to_start = lambda number: number == 1

    async def drive() -> list:
        async with pool(1) as single:
            with pytest.raises(Unavailable, match="lost"):
                await single.generate(SampleRequest("p", [5], {}, 0))
            return await single.generate(SampleRequest("p", [5], {}, 0))

    assert asyncio.run(drive()) == []
    assert [replica.num_asked for replica in scripted.made] == [1, 0, 1]
    assert not any(replica.is_running for replica in scripted.made), "the pool is closed"


def test_replicas_that_die_as_fast_as_they_start_are_given_up(scripted: type[Scripted]) -> None:
    scripted.is_lost = lambda _: True

    async def drive() -> None:
        async with pool(1) as single:
            while True:
                try:
                    await single.generate(SampleRequest("p", [5], {}, 0))
                except Unavailable:
                    continue

    with pytest.raises(Unusable, match="no replica is left"):
        asyncio.run(drive())
    assert len(scripted.made) == 1 + replica_pool.MAX_FAILED_STARTS
