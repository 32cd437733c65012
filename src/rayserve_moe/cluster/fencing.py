"""Reliable termination of the processes of a group: a stopped process outlives `ray.kill` by seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GONE_S = 2.0
"""Maximum wait for killed processes to exit; a device accepts no second process while the first is alive."""
FAR_S = 5.0
POLL_S = 0.01


class HostProcess(NamedTuple):
    """A process of a cluster node."""

    node_id: str
    pid: int
    started: str
    """Start time in ticks; distinguishes it from a later process with the same pid."""


def this_process() -> HostProcess:
    """Return the calling process, an actor or a driver."""
    return HostProcess(ray.get_runtime_context().get_node_id(), os.getpid(), _start_of(os.getpid()))


def end_processes(processes: Sequence[HostProcess], *, waits_far: bool) -> None:
    """Kill processes, on other nodes by a Ray task, and wait until they are gone.

    Processes on other nodes are awaited only if `waits_far`, and for at most `FAR_S`: the node may be lost.
    """
    here = ray.get_runtime_context().get_node_id()
    far = [each for each in processes if each.node_id != here]
    calls = [_end_there.options(scheduling_strategy=_on(each.node_id)).remote(each.pid, each.started) for each in far]
    for each in processes:
        if each.node_id == here:
            end_process(each.pid, each.started)
    if waits_far:
        with suppress(RayError):
            ray.get(calls, timeout=FAR_S)


def end_process(pid: int, started: str) -> None:
    """Kill a process of this machine and wait until it is gone."""
    deadline = time.monotonic() + GONE_S
    while _start_of(pid) == started and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


_end_there = ray.remote(num_cpus=0, max_retries=0)(end_process)


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _start_of(pid: int) -> str:
    """Return a process's start time in ticks; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
