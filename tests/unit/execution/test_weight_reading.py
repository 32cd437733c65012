"""Reading other weights never holds up anybody: what hangs is given up, and what follows is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayserve_moe.config.settings import UpdateSettings
from rayserve_moe.execution.weights.staged import GIVEN_UP, MAX_STUCK, WeightReading
from rayserve_moe.inprocess.engine import LocalExecutor
from rayserve_moe.requests.records import WeightsRefusedError
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy
from tests.unit.execution.test_staged_weights import assert_weights, loaded

WITHIN_S = 60.0


class StuckFiles:
    """A disk that does not answer: who reads from it waits until `answers` is set. Each is counted in `waiting`."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.waiting = threading.Semaphore(0)
        self._copy = os.preadv

    def preadv(self, descriptor: int, *arguments) -> int:
        if "stuck" in os.readlink(f"/proc/self/fd/{descriptor}") and not self.answers.is_set():
            self.waiting.release()
            self.answers.wait(WITHIN_S)
        return self._copy(descriptor, *arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckFiles]:
    stuck = StuckFiles()
    monkeypatch.setattr(os, "preadv", stuck.preadv)
    yield stuck
    stuck.answers.set()
    for thread in threading.enumerate():
        if thread.name == "weights":
            thread.join(WITHIN_S)


@pytest.fixture
def stuck(other_checkpoint: Path, tmp_path: Path) -> str:
    copied = tmp_path / "stuck files"
    copied.mkdir()
    for file in other_checkpoint.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return str(copied)


def test_what_hangs_is_given_up_and_never_comes_back(core_checkpoint, other_checkpoint, disk, stuck):
    """Not even where the disk answers after all, and the weights of the one after it wait to be taken."""
    runner = loaded(core_checkpoint)
    reading = WeightReading(runner.staged)
    reading.begin(stuck, None)
    assert disk.waiting.acquire(timeout=WITHIN_S)
    assert reading.outcome() is None
    reading.give_up()
    assert reading.outcome() == GIVEN_UP
    reading.begin(str(other_checkpoint), None)
    assert reading.outcome(WITHIN_S) == ""
    disk.answers.set()
    for thread in reading._threads:
        thread.join(WITHIN_S)
    runner.weights = runner.staged.take(runner.weights)
    assert_weights(runner, other_checkpoint, runner.placement)
    with pytest.raises(AssertionError, match="nothing is staged"):
        runner.staged.take(runner.weights)


def test_readings_that_hang_are_counted(core_checkpoint, other_checkpoint, disk, stuck):
    reading = WeightReading(loaded(core_checkpoint).staged)
    for _ in range(MAX_STUCK):
        reading.begin(stuck, None)
        assert disk.waiting.acquire(timeout=WITHIN_S)
    reading.begin(str(other_checkpoint), None)
    assert reading.outcome(WITHIN_S) == f"{MAX_STUCK} earlier reads still hang"
    disk.answers.set()
    for thread in reading._threads:
        thread.join(WITHIN_S)
    reading.begin(str(other_checkpoint), None)
    assert reading.outcome(WITHIN_S) == ""


def test_weights_that_come_too_late_are_refused_and_the_next_ones_are_not(
    core_checkpoint, other_checkpoint, disk, stuck
):
    runner = loaded(core_checkpoint)
    with pytest.raises(WeightsRefusedError, match=r"not read within staging_timeout_s = 0\.2 s"):
        LocalExecutor(runner, UpdateSettings(staging_timeout_s=0.2)).stage_weights(stuck, None)
    executor = LocalExecutor(runner)
    executor.stage_weights(str(other_checkpoint), None)
    runner.weights = runner.staged.take(runner.weights)
    assert_weights(runner, other_checkpoint, runner.placement)


def test_an_executor_that_is_shut_down_waits_for_no_reading(core_checkpoint, disk, stuck):
    executor = LocalExecutor(loaded(core_checkpoint))
    told: list[str] = []

    def stage() -> None:
        try:
            executor.stage_weights(stuck, None)
        except WeightsRefusedError as refusal:
            told.append(str(refusal))

    thread = threading.Thread(target=stage)
    thread.start()
    assert disk.waiting.acquire(timeout=WITHIN_S)
    executor.shutdown()
    thread.join(WITHIN_S)
    assert told == [GIVEN_UP] and not disk.answers.is_set()


@pytest.mark.parametrize("way", ["config nested", "more layers than any model", "pipe for weights"])
def test_a_first_start_is_refused_as_an_update_is(core_checkpoint, tmp_path, way):
    """By one line that names the file."""
    with pytest.raises(ValueError, match=WAYS[way][1]) as refusal:
        loaded(broken_copy(core_checkpoint, way, tmp_path / "model"))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
