"""Step shapes that are compiled while the server already answers, where that changes no result.

A server starts with the smallest and the largest shape of each kind: together they hold every step. The others save
padding. They are compiled behind the steps, one after the other, and are used once all of their programs are there.
That is for native kernels on one host, whose rows have the same bits in every shape; hosts of a group have to choose
the same shape, and start with all of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from rayserve_moe.execution.programs.cache import KeptPrograms
from rayserve_moe.execution.programs.compiled import CompilationCount, CompiledPrograms, CompileTimes, compile_shape
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.kernels.table import CPU_NATIVE

NICENESS = 10
"""Niceness of the compiling thread: steps come first, and it still progresses beside them."""
log = logging.getLogger(__name__)


def first_shapes(served: ServedModel) -> tuple[StepShape, ...]:
    """Return the shapes that a server needs before it serves, in the order of `served.shapes`."""
    if served.config.kernels is not CPU_NATIVE or jax.process_count() > 1:
        return served.shapes
    decode = [shape for shape in served.shapes if not shape.num_blocks]
    mixed = [shape for shape in served.shapes if shape.num_blocks]
    needed = {decode[0], decode[-1], mixed[0], mixed[-1]}
    return tuple(shape for shape in served.shapes if shape in needed)


class LaterShapes:
    """Compiles the shapes that `programs` lack in a thread of its own, the smallest first."""

    def __init__(
        self,
        programs: CompiledPrograms,
        served: ServedModel,
        *,
        num_pages: int,
        kept: KeptPrograms | None,
        count: CompilationCount,
    ) -> None:
        self._programs, self._served, self._num_pages, self._kept = programs, served, num_pages, kept
        self._count, self._stops = count, threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, use: Callable[[Sequence[StepShape]], None]) -> None:
        """Begin to compile; `use` gets all shapes that can run, whenever there is another one."""
        missing = [shape for shape in self._served.shapes if shape not in self._programs.steps]
        if not missing or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, args=(missing, use), name="later-shapes", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # XLA may not be in the middle of a program when its process ends

    def wait(self) -> None:
        """Wait until every shape is there, or `stop` was called."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Compile no further program; returns when the one under way is done."""
        self._stops.set()
        self.wait()
        atexit.unregister(self.stop)

    def _run(self, missing: Sequence[StepShape], use: Callable[[Sequence[StepShape]], None]) -> None:
        with suppress(OSError):  # a sandbox may refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        started, num_programs, num_found = time.perf_counter(), 0, 0
        for shape in missing:
            if self._stops.is_set():
                return
            try:
                with self._count.planned():
                    times = self._compile(shape)
            except jax.errors.JaxRuntimeError as error:
                log.warning(
                    "steps of %d tokens do not compile, larger ones take their place: %s", shape.num_tokens, error
                )
                continue
            num_programs, num_found = num_programs + times.num_programs, num_found + times.num_found
            use(tuple(each for each in self._served.shapes if each in self._programs.steps))
        counts = num_programs, time.perf_counter() - started, num_found
        log.info("%d more programs compiled in %.1f s beside the steps, %d found on disk", *counts)

    def _compile(self, shape: StepShape) -> CompileTimes:
        return compile_shape(shape, self._programs, served=self._served, num_pages=self._num_pages, kept=self._kept)
