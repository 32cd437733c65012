"""Weights that served take no memory once others do."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks.host_memory import anonymous_bytes
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.execution.memory import FreedMemory
from rayserve_moe.execution.weights.staged import WeightReading
from rayserve_moe.scheduling.step_plan import StepPlan
from tests.unit.execution.test_staged_weights import loaded

WITHIN_S = 120.0


@pytest.mark.slow
def test_a_host_has_one_copy_of_its_weights_after_updates_as_before_them(tmp_path: Path) -> None:
    """Blocks that jax had copied stayed until a collection, and what malloc had of earlier reading for good: a third
    of the weights and more with every update."""
    path = ensure_checkpoint(tmp_path / "small", "small")
    share = open_checkpoint(path).num_bytes
    runner = loaded(path)
    reading = WeightReading(runner.staged)

    def update() -> None:
        reading.begin(str(path), None)
        assert reading.outcome(WITHIN_S) == ""
        runner.execute(StepPlan(step_id=-1, takes_staged_weights=True))

    def copies() -> float:
        return anonymous_bytes(os.getpid()) / share

    update()
    time.sleep(1.0)
    before = copies()
    for _ in range(4):
        update()
    deadline = time.monotonic() + WITHIN_S
    while copies() > before + 0.1:
        assert time.monotonic() < deadline, f"{copies() - before:.2f} copies are left of weights that served"
        time.sleep(0.1)


def test_updates_in_a_row_share_the_thread_that_waits() -> None:
    freed, before = FreedMemory(), threading.active_count()
    for _ in range(5):
        freed.request()
    assert threading.active_count() == before + 1
