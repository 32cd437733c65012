"""The rollout job with engines of its own in a Ray cluster, and its shards read by Ray Data."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.data
import yaml
from ray.util.placement_group import placement_group_table

from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.replica_pool import ReplicaPool
from rayserve_moe.rollouts.schema import Rollout
from tests.cluster.conftest import SETTINGS
from tests.rollouts.support import assert_equal, errors_in, job, samples_in, started_job, summary_in
from tests.support.cluster.child_processes import descendants
from tests.support.serving.http_client import wait_until

NUM_PROMPTS = 12


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model_path": str(checkpoint), **SETTINGS}), encoding="utf-8")
    return file


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "input_ids": list(range(5 + i, 30 + 2 * i))} for i in range(NUM_PROMPTS)]
    lines = [*(json.dumps(row) for row in rows), json.dumps({"input_ids": [10**6]}), "{}"]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def kill_worker(monkeypatch: pytest.MonkeyPatch, *, after_answers: int) -> list[int]:
    """Have the worker of the job's engine killed after so many answers, while the job waits; returns who was."""
    generate, num_answers, killed = ReplicaPool.generate, itertools.count(1), []

    async def answer(pool: ReplicaPool, request: SampleRequest) -> list[Rollout]:
        rollouts = await generate(pool, request)
        if next(num_answers) == after_answers:
            killed.extend(descendants("ray::HostWorker"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return rollouts

    monkeypatch.setattr(ReplicaPool, "generate", answer)
    return killed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")
def test_engines_of_the_job_and_the_loss_of_one(
    raylets: int,
    config: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker is killed on the way: another takes over, and every sample equals an undisturbed run's.

    Requests that wait for more than 5 s for it are tried again.
    """
    out, killed = tmp_path / "out", kill_worker(monkeypatch, after_answers=4)
    assert job(prompts, out, "--config", str(config), "--in-flight", "4", "--flush-s", "0.05", n=2) == 0
    assert len(killed) == 1 and "hosts are replaced" in caplog.text
    assert (
        sorted(errors_in(out)) == [NUM_PROMPTS, NUM_PROMPTS + 1] and "vocabulary" not in errors_in(out)[NUM_PROMPTS + 1]
    )
    found = samples_in(out)
    assert len(found) == 2 * NUM_PROMPTS
    assert job(prompts, tmp_path / "undisturbed", "--config", str(config), n=2) == 0
    assert_equal(found, samples_in(tmp_path / "undisturbed"))
    wait_until(lambda: not descendants("ray::HostWorker"))
    check_ray_data(out, found)


@pytest.mark.slow
def test_several_engines_and_the_loss_of_one(joins: None, config: Path, prompts: Path, tmp_path: Path) -> None:
    """Of two, each in a process of its own, one is killed: another comes, and all samples are as from a single one."""
    rows = [json.dumps({"id": i, "input_ids": [5 + i % 400, 6, 7]}) for i in range(400)]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    two = ["--config", str(config), "--replicas", "2", "--in-flight", "16", "--flush-s", "0.05"]
    with started_job(prompts, tmp_path / "two", *two, n=2) as process:
        wait_until(lambda: has_shards(tmp_path / "two"), within_s=1200)
        replicas = descendants("ray::ReplicaProcess")
        os.kill(replicas[0], signal.SIGKILL)
        assert process.wait(timeout=1200) == 0
    assert len(replicas) == 2 and summary_in(tmp_path / "two")["retries"] > 0
    assert job(prompts, tmp_path / "one", "--config", str(config), n=2) == 0
    assert_equal(samples_in(tmp_path / "two"), samples_in(tmp_path / "one"))


@pytest.fixture
def joins(raylets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is a process joins this Ray cluster."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


def has_shards(out: Path) -> bool:
    return bool(list(out.glob("rollouts/[!.]*")))


def check_ray_data(out: Path, samples: dict) -> None:
    """Ray Data reads the same files, with the routing of every sample."""
    rows = ray.data.read_parquet(str(out / "rollouts")).take_all()
    assert len(rows) == len(samples)
    for row in rows:
        wanted = samples[row["prompt_id"], row["sample_index"]]
        routing = np.frombuffer(row["routing"], row["routing_dtype"]).reshape(row["routing_shape"])
        assert np.array_equal(routing, wanted["rows"]) and list(row["output_ids"]) == wanted["output_ids"]


def test_engines_that_do_not_start_end_the_job(raylets: int, config: Path, prompts: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    config.write_text(yaml.safe_dump({**settings, "model_path": str(tmp_path)}), encoding="utf-8")
    assert job(prompts, tmp_path / "out", "--config", str(config)) == 1
    assert str(tmp_path) in summary_in(tmp_path / "out")["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("cpus_per_host", [pytest.param(1000, id="waits for room"), pytest.param(1, id="loads")])
def test_a_job_is_told_to_stop_while_its_engine_starts(
    joins: None, config: Path, prompts: Path, tmp_path: Path, cpus_per_host: int
) -> None:
    """At once, and nothing of the engine stays."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    config.write_text(yaml.safe_dump({**settings, "cpus_per_host": cpus_per_host}), encoding="utf-8")
    with started_job(prompts, tmp_path / "out", "--config", str(config), n=2) as process:
        wait_until(lambda: "PENDING" in states_of_reservations() or descendants("ray::HostWorker"), within_s=1200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=1200) == 3
    assert summary_in(tmp_path / "out")["reason"] == "stopped by a signal"
    wait_until(lambda: states_of_reservations() <= {"REMOVED"} and not descendants("ray::HostWorker"))


def states_of_reservations() -> set[str]:
    return {group["state"] for group in placement_group_table().values()}


@pytest.mark.slow
def test_a_job_is_told_to_stop_while_its_engine_samples(
    joins: None, config: Path, prompts: Path, tmp_path: Path
) -> None:
    out, rows = tmp_path / "out", [json.dumps({"input_ids": [5 + i % 400, 6, 7]}) for i in range(4000)]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    with started_job(prompts, out, "--config", str(config), "--flush-s", "0.05", n=2) as process:
        wait_until(lambda: has_shards(out), within_s=1200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=1200) == 3
    assert 0 < summary_in(out)["samples_written"] == len(samples_in(out)) < 2 * len(rows)
    wait_until(lambda: not descendants("ray::HostWorker"))


@pytest.mark.slow
def test_the_documented_submission(config: Path, tmp_path: Path) -> None:
    """Ray's job server runs the documented line, and once more from a changed directory: nothing is sampled again."""
    directory = tmp_path / "checkout"
    (directory / "configs").mkdir(parents=True)
    rows = [{"id": i, "input_ids": [5 + i, 6, 7], "sampling_params": {"max_new_tokens": 8}} for i in range(NUM_PROMPTS)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config.rename(directory / "configs" / "qwen3_moe.yaml")
    for written, present in ((8 * NUM_PROMPTS, 0), (0, 8 * NUM_PROMPTS)):
        command = [sys.executable, "-m", "tests.cluster.rollout_submission", str(directory), documented_submission()]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        report = json.loads(printed.splitlines()[-1])
        assert report["status"] == 0, report["log"]
        assert f"{written} samples written, {present} were there" in report["log"], report["log"]
        assert f"writes to {directory / 'rollouts'}" in report["log"]
        (directory / "changed").touch()
    out = directory / "rollouts"
    assert len(samples_in(out)) == 8 * NUM_PROMPTS and not errors_in(out)


def documented_submission() -> str:
    """The command of docs/rollouts.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (ray job submit .*\\\n .*--config .*)$", text, re.MULTILINE)
    return command
