"""Workers and engines set XLA's number of threads on CPU hosts; workers also their priority and a timeout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayserve_moe import Engine
from rayserve_moe.cluster.host_worker import limit_collectives
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.platforms import NICENESS, ONE_THREAD_BYTES, XLA_THREADS, limit_threads


def checkpoint_of(directory: Path, num_bytes: int) -> Path:
    (directory / "config.json").write_text("{}")
    halves = np.zeros(num_bytes // 4, np.float16)
    save_file({"a": halves, "b": halves}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("num_bytes", "set_by_user", "threads"),
    [
        (ONE_THREAD_BYTES - 4, None, "1"),
        (ONE_THREAD_BYTES, None, None),
        (ONE_THREAD_BYTES - 4, "3", "3"),
        (ONE_THREAD_BYTES, "3", "3"),
    ],
)
def test_a_small_checkpoint_gets_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, set_by_user: str | None, threads: str | None
) -> None:
    monkeypatch.setenv(XLA_THREADS, set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv(XLA_THREADS)
    limit_threads(checkpoint_of(tmp_path, num_bytes))
    assert os.environ.get(XLA_THREADS) == threads


THREADS = """
import os
from threading import Event, Thread
from rayserve_moe.execution.platforms import lower_priority

ends = Event()
Thread(target=ends.wait).start()
os.setpriority(os.PRIO_PROCESS, 0, 7)
lower_priority()
lower_priority()
print(sorted(os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")))
ends.set()
"""


def test_threads_of_a_worker_let_those_of_servers_go_first() -> None:
    """Linux has a nice value per thread. One that is higher already stays."""
    done = subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert found[-1] == 7 and set(found[:-1]) == {NICENESS}


@pytest.mark.parametrize(("platform", "threads"), [("auto", "1"), ("cpu", "1"), ("gpu", None)])
def test_an_engine_limits_them_before_it_takes_a_device(
    monkeypatch: pytest.MonkeyPatch, core_checkpoint: Path, platform: str, threads: str | None
) -> None:
    """The worker of a server does the same, so both run the same programs."""
    monkeypatch.setenv(XLA_THREADS, "")
    monkeypatch.delenv(XLA_THREADS)
    with pytest.raises((ValueError, SettingsError), match=r"4 does not divide over 3 devices|platform gpu"):
        Engine(str(core_checkpoint), platform=platform, devices_per_host=3)
    assert os.environ.get(XLA_THREADS) == threads


@pytest.mark.parametrize(
    ("set_by_user", "expected"),
    [
        ("", "--xla_cpu_collective_timeout_seconds=3"),
        ("--xla_dump_to=a", "--xla_dump_to=a --xla_cpu_collective_timeout_seconds=3"),
        ("--xla_cpu_collective_timeout_seconds=9", "--xla_cpu_collective_timeout_seconds=9"),
    ],
)
def test_collectives_between_hosts_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str, expected: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", set_by_user)
    limit_collectives(2.5)
    assert os.environ["XLA_FLAGS"] == expected
