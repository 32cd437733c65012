"""The rollout job against a Serve application, while drivers, a worker and the replica itself are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS
from tests.rollouts.support import assert_equal, errors_in, job, samples_in, started_job, summary_in
from tests.support.cluster.child_processes import descendants
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port

NUM_PROMPTS, NUM_SAMPLES = 300, 4
MALFORMED = {10: "not json", 150: '{"text": 5}', 302: '{"input_ids": [1000000]}'}
"""Lines by their positions in the file."""
TOLD_TO_STOP = 3
"""Status of a job that was told to stop."""


@pytest.fixture
def url(raylets: int, checkpoint: Path) -> Iterator[str]:
    port = free_port()
    sizes = {"max_running_requests": 16, "precompile_bs_paddings": [16], "num_pages": 200}
    settings = {**SETTINGS, **sizes, "drain_timeout_s": 1.0}
    with deployed(checkpoint, settings, port=port, name="rollouts"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    chance = random.Random(0)
    rows = [{"id": i, "input_ids": [chance.randrange(5, 500) for _ in range(8 + i % 40)]} for i in range(NUM_PROMPTS)]
    lines = [json.dumps(row) for row in rows]
    for position, line in MALFORMED.items():
        lines.insert(position, line)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def start(prompts: Path, out: Path, url: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return started_job(prompts, out, "--url", url, "--flush-s", "0.2", "--in-flight", "32", n=NUM_SAMPLES)


def wait_for_samples(out: Path, driver: subprocess.Popen[str], count: int) -> None:
    """Wait until so many samples are there, and some are still to come from a driver that runs."""
    deadline = time.monotonic() + 1800
    found = 0
    while found < count:
        assert time.monotonic() < deadline, f"{found} of {count} samples came"
        time.sleep(0.1)
        found = len(samples_in(out)) if list(out.glob("rollouts/[!.]*")) else 0
    assert driver.poll() is None, f"the driver ended before {count} samples were seen"


def kill(title: str) -> None:
    """Kill the actors with this title: the one there is, and one that is on its way out."""
    pids = descendants(title)
    assert pids, "there is nothing to kill"
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_whatever_is_killed_every_sample_comes_once(url: str, prompts: Path, tmp_path: Path) -> None:
    """Three drivers, a worker and the replica are killed; the samples equal those of an undisturbed run.

    The replica replaces its worker under the requests, so that only a killed replica has to be asked again.
    """
    out = tmp_path / "out"
    for count in (100, 250, 400):
        with start(prompts, out, url) as driver:
            wait_for_samples(out, driver, count)
    with start(prompts, out, url) as driver:
        wait_for_samples(out, driver, 500)
        kill("ray::HostWorker")
        wait_for_samples(out, driver, 600)
        driver.terminate()
        assert driver.wait(timeout=1800) == TOLD_TO_STOP
    with start(prompts, out, url) as driver:
        wait_for_samples(out, driver, 700)
        kill("ray::ServeReplica:rollouts:")
        assert driver.wait(timeout=1800) == 0
    assert summary_in(out)["retries"] > 0, "nobody asked for anything while there was no replica"
    found = samples_in(out)
    assert found.keys() == {(str(i), sample) for i in range(NUM_PROMPTS) for sample in range(NUM_SAMPLES)}
    assert sorted(errors_in(out)) == sorted(MALFORMED)
    assert job(prompts, tmp_path / "undisturbed", "--url", url, n=NUM_SAMPLES) == 0
    assert_equal(found, samples_in(tmp_path / "undisturbed"))
