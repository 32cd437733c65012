"""The job as a process that is killed, stopped by a signal, or kept out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rayserve_moe.rollouts.shards import RolloutDirectory, ShardError
from tests.rollouts.conftest import UnreliableRoad
from tests.rollouts.support import assert_equal, errors_in, job, samples_in, started_job, summary_in

NUM_PROMPTS, NUM_SAMPLES = 60, 4


@pytest.fixture
def many(tmp_path: Path) -> Path:
    file = tmp_path / "many.jsonl"
    rows = [{"id": i, "input_ids": [5 + i, 6, 7]} for i in range(NUM_PROMPTS)]
    lines = [*(json.dumps(row) for row in rows), "not json"]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def start(prompts: Path, out: Path, url: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start the job with few samples under way, so that it does not end at once, and shards that come often."""
    return started_job(prompts, out, "--url", url, "--in-flight", "8", "--flush-s", "0.05", n=NUM_SAMPLES)


def wait_for_shards(out: Path, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 600
    while len(list(out.glob("rollouts/[!.]*"))) < count:
        assert process.poll() is None and time.monotonic() < deadline, "no shards came"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_was(url: str, road: UnreliableRoad, many: Path, tmp_path: Path) -> None:
    """After SIGKILL everything that is missing, and nothing else, is sampled; all equals an undisturbed run."""
    out = tmp_path / "out"
    with start(many, out, url) as process:
        wait_for_shards(out, process, 2)
        os.kill(process.pid, signal.SIGKILL)
    before = samples_in(out)
    assert 0 < len(before) < NUM_PROMPTS * NUM_SAMPLES
    road.num_prompts = 0
    assert job(many, out, "--url", url, n=NUM_SAMPLES) == 0
    after = samples_in(out)
    assert_equal({key: after[key] for key in before}, before)
    assert len(after) == NUM_PROMPTS * NUM_SAMPLES and list(errors_in(out)) == [NUM_PROMPTS]
    assert road.num_prompts == NUM_PROMPTS - len(before) // NUM_SAMPLES
    assert job(many, tmp_path / "undisturbed", "--url", url, n=NUM_SAMPLES) == 0
    assert_equal(after, samples_in(tmp_path / "undisturbed"))


def test_a_job_that_is_told_to_stop_keeps_what_has_come(url: str, many: Path, tmp_path: Path) -> None:
    """SIGTERM: what has come is written, the summary says so, the status is 3; meanwhile nobody else may write."""
    out = tmp_path / "out"
    with start(many, out, url) as process:
        wait_for_shards(out, process, 1)
        with pytest.raises(ShardError, match="another job"), RolloutDirectory(out):
            pass
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 3 and "stopped by a signal" in printed
    assert summary_in(out)["samples_written"] == len(samples_in(out)) < NUM_PROMPTS * NUM_SAMPLES
