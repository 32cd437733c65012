"""Watching when steps are started and when they are ready, to see how long the devices waited for the host between."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax

from rayserve_moe.execution.programs.compiled import CompiledPrograms, CompiledStep
from rayserve_moe.execution.step.pytrees import StepOutput

SWITCH_INTERVAL_S = 1e-4
"""The watching thread gets the interpreter within this time of a step's end, so it sees no end later than that."""


@dataclass(frozen=True)
class StepSpan:
    """When the call of a step's program began, and when its output was there; seconds of `perf_counter`."""

    started: float
    ready: float


def waited_seconds(spans: Sequence[StepSpan]) -> float:
    """Time between a step's end and the start of the next one; none where the next had been started before."""
    return sum(max(0.0, after.started - before.ready) for before, after in itertools.pairwise(spans))


class StepWatch:
    """A context manager; inside it, every step of a runner's programs leaves a span in `spans`, in order.

    A thread of its own waits for each output. Enter and leave it while the engine is idle.
    """

    def __init__(self, programs: CompiledPrograms) -> None:
        self.spans: list[StepSpan] = []
        self._steps = programs.steps
        self._plain = dict(programs.steps)
        self._outputs: queue.SimpleQueue[tuple[float, StepOutput] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_outputs, name="step-watch")
        self._switch_interval_s = sys.getswitchinterval()

    def __enter__(self) -> Self:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._steps.update({shape: self._watched(step) for shape, step in self._plain.items()})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.update(self._plain)
        self._outputs.put(None)
        self._thread.join()
        sys.setswitchinterval(self._switch_interval_s)

    def _watched(self, step: CompiledStep) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            state, output = step(*arguments, **named)
            self._outputs.put((started, output))
            return state, output

        return run

    def _wait_for_outputs(self) -> None:
        while (item := self._outputs.get()) is not None:
            started, output = item
            jax.block_until_ready(output)
            self.spans.append(StepSpan(started, time.perf_counter()))
