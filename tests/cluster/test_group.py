"""What the hosts of a group agree on before they compile."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import GetTimeoutError

from rayserve_moe.cluster import group_executor, host_group
from rayserve_moe.cluster.channel import Address
from rayserve_moe.cluster.fencing import HostProcess, this_process
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.cluster.heartbeat import Heartbeat
from rayserve_moe.cluster.host_group import GroupWeights, HostGroup
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.scheduling.step_plan import StepPlan

PAGES = (70, 50, 60)


@ray.remote(num_cpus=0)
class SmallHost:
    """A host whose memory has room for so many pages; it says what it is told to prepare."""

    def __init__(self, _: Any, place: Any) -> None:
        self._num_pages = PAGES[place.host_id]

    def process(self) -> HostProcess:
        return this_process()

    def listen_for_watch(self, key: bytes, timeout_s: float) -> Address:
        return Heartbeat().listen(host="127.0.0.1", key=key, timeout_s=timeout_s)

    def load(self, *_: str, **__: object) -> int:
        return self._num_pages

    def prepare(self, num_pages: int) -> None:
        raise ValueError(f"told {num_pages} pages")


@ray.remote(num_cpus=0)
class DyingHost:
    """A host that reads for ever, and dies when it is told to stop."""

    def begin_staging(self, *_: Any) -> None:
        return

    def staging_outcome(self) -> None:
        return

    def drop_staged(self) -> None:
        os._exit(1)


@ray.remote(num_cpus=0)
class SilentHost:
    """A host that never answers, as one that is stopped while it starts."""

    def process(self) -> None:
        threading.Event().wait()


def test_a_process_that_replaces_another_and_never_answers_is_given_up(
    raylets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no heartbeat yet, and `start_timeout_s` is for a first start."""
    monkeypatch.setattr(host_group, "REPLACING_S", 0.5)
    cluster = settings_from({"model_path": "unread", "start_timeout_s": 3600}).cluster
    group = HostGroup([SilentHost.remote()], cluster, on_loss=lambda: None, given_up=threading.Event())
    try:
        with pytest.raises(GetTimeoutError):
            group.start(GroupWeights(num_pages=PAGES[0]), enter=lambda phase: None)
    finally:
        group.end()


def test_a_host_that_dies_while_it_drops_weights_is_lost(raylets: int) -> None:
    settings = settings_from({"model_path": "unread", "staging_timeout_s": 1})
    runner = cast(RunnerSettings, SimpleNamespace(updates=settings.updates))
    group = GroupExecutor(runner, parallel=settings.parallel, cluster=settings.cluster)
    group.workers = [DyingHost.remote()]
    with pytest.raises(ExecutorFailure, match="lost"):
        group.stage_weights("/unread", None)
    group.shutdown()


def test_weights_that_were_sent_are_not_replaced_by_older_ones() -> None:
    """No disk has them: hosts that are lost then are not replaced."""
    settings = settings_from({"model_path": "unread"})
    runner = cast(RunnerSettings, SimpleNamespace(updates=settings.updates))
    group = GroupExecutor(runner, parallel=settings.parallel, cluster=settings.cluster)
    group._group = cast(HostGroup, SimpleNamespace(execute=lambda _: None, end=lambda: None, loss=None))
    group.tensors.finish()
    group.execute(StepPlan(step_id=0, takes_staged_weights=True))
    with pytest.raises(ExecutorFailure, match="no copy was kept"):
        group.rebuild()


def test_hosts_have_the_pages_of_the_smallest(raylets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page tables of a plan hold for every host."""
    monkeypatch.setattr(group_executor, "RemoteHostWorker", SmallHost)
    settings, unread = settings_from({"model_path": "unread", "num_hosts": len(PAGES)}), cast(RunnerSettings, None)
    group = GroupExecutor(unread, parallel=settings.parallel, cluster=settings.cluster)
    try:
        with pytest.raises(ValueError, match="told 50 pages"):
            group.start()
    finally:
        group.shutdown()
