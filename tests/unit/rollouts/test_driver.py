"""The driver's patience, bounds and care, with sources that misbehave."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe.rollouts.answers import SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.driver import Driver, JobSettings
from rayserve_moe.rollouts.prompts import Row
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory


class Answering:
    """Answers with the numbers of samples for ids, as late as `delay_s` says."""

    def __init__(self, *, delay_s: float = 0.0, failures: int = 0) -> None:
        self.delay_s, self.failures = delay_s, failures
        self.under_way, self.most_under_way = 0, 0

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        self.under_way += request.count
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.delay_s)
        self.under_way -= request.count
        if self.failures:
            self.failures -= 1
            raise Unavailable("gone")
        return [rollout(request, request.first + i) for i in range(request.count)]

    async def model_info(self) -> dict[str, Any]:
        return {}


def rollout(request: SampleRequest, number: int) -> Rollout:
    ids = np.asarray([number], np.int32)
    return Rollout(request.prompt_id, number, "0", request.seed, ids, ids, ids.astype(np.float32), (), "", "stop")


def rows(count: int) -> Iterator[Row]:
    return (Row(i, str(i), {"input_ids": [i + 1]}) for i in range(count))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RolloutDirectory]:
    with RolloutDirectory(tmp_path) as directory:
        yield directory


def run(source: Answering, directory: RolloutDirectory, count: int, **settings: Any) -> Driver:
    async def drive() -> Driver:
        driver = Driver(source, directory, settings=JobSettings(**{"num_samples": 2, **settings}))
        await driver.run(rows(count))
        return driver

    return asyncio.run(drive())


def test_a_long_answer_that_breaks_off_is_not_a_silent_server(directory: RolloutDirectory) -> None:
    """What counts is the time since answers fail, not since the last one came."""
    source = Answering(delay_s=0.3, failures=1)
    assert run(source, directory, 1, give_up_s=0.2).tally.samples_written == 2


def test_a_silent_server_is_given_up(directory: RolloutDirectory) -> None:
    with pytest.raises(Unusable, match="no answer for 0 s; the last try: gone"):
        run(Answering(failures=10**9), directory, 5, give_up_s=0.4)


def test_no_more_are_under_way_than_may_be(directory: RolloutDirectory) -> None:
    source = Answering(delay_s=0.001)
    driver = run(source, directory, 40, in_flight=6)
    assert source.most_under_way == 6 and driver.tally.samples_written == 80


def test_many_samples_of_a_prompt_are_asked_for_in_parts(directory: RolloutDirectory) -> None:
    run(Answering(), directory, 1, num_samples=300)
    assert directory.samples_of("0", "0") == set(range(300))


def test_a_full_disk_ends_the_job_and_loses_nothing(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes out, and what could not be written is written as soon as there is room."""
    write, refused = directory.write_rollouts, []

    def refuse_once(rollouts: list[Rollout]) -> None:
        if not refused:
            refused.extend(rollouts)
            raise OSError(errno.ENOSPC, "no space left")
        write(rollouts)

    monkeypatch.setattr(directory, "write_rollouts", refuse_once)
    with pytest.raises(OSError, match="no space"):
        run(Answering(), directory, 30, in_flight=2, shard_bytes=5000)
    assert refused and all(each.sample_index in directory.samples_of(each.prompt_id, "0") for each in refused)
