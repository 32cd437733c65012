"""Meeting a running engine in the middle of its work: its steps are awaited, slowed down, or held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.scheduling.scheduler import Commit

WITHIN_S = 600.0
"""Longest wait for an engine that has something to do."""


@contextmanager
def unhurried(loop: EngineLoop, *, delay_s: float = 0.005) -> Iterator[None]:
    """Have every step take so much longer that what is to be met while it runs still runs."""
    run = loop._cycle.run

    def run_later() -> Commit:
        time.sleep(delay_s)
        return run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._cycle, "run", run_later)
        yield


def wait_for_tokens(loop: EngineLoop, number: int) -> None:
    """Let an engine sample so many more tokens."""
    target, deadline = loop.statistics()["tokens_sampled"] + number, time.monotonic() + WITHIN_S
    while loop.statistics()["tokens_sampled"] < target:
        assert time.monotonic() < deadline, "the engine stands still"
        time.sleep(0.002)


class StepGate:
    """Every step of an engine waits here until it may run; what is asked of the engine between two steps waits too."""

    def __init__(self, run: Callable[[], Commit]) -> None:
        self._run = run
        self._arrived, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._is_met = self._is_open = False

    def meet(self) -> None:
        """Wait until the engine waits to run a step; the one before it is under way, all others are done."""
        assert self._is_met or self._arrived.acquire(timeout=WITHIN_S), "the engine has no step to run"
        self._is_met = True

    def let_run(self, count: int = 1) -> None:
        """Meet so many steps one after the other, and let each of them run."""
        for _ in range(count):
            self.meet()
            self._is_met = False
            self._allowed.release()

    def open(self) -> None:
        """Let all steps run from now on."""
        self._is_open = True
        self._allowed.release()

    def pass_through(self) -> Commit:
        """Run a step, in the engine's thread, once it may, or once nobody has let it for WITHIN_S."""
        self._arrived.release()
        if not self._is_open:
            self._allowed.acquire(timeout=WITHIN_S)
        return self._run()


@contextmanager
def held_steps(loop: EngineLoop) -> Iterator[StepGate]:
    """Hold the steps of an engine; in the end it goes on, even if somebody has paused it."""
    gate = StepGate(loop._cycle.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._cycle, "run", gate.pass_through)
        try:
            yield gate
        finally:
            gate.open()
            loop.control.resume().result(WITHIN_S)
