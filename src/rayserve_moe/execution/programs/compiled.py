"""The compiled programs of a server, at its start and beside its steps. The only place that compiles.

A server may start with the smallest and the largest shape of each kind: together they hold every step. The others save
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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring
import numpy as np

from rayserve_moe.config.load import unset_compiler_options
from rayserve_moe.execution.programs.cache import KeptPrograms, signature_of, without_cache_of_jax
from rayserve_moe.execution.programs.specs import (
    ADJUST,
    COPY,
    DRAFT,
    FETCH,
    PROBE,
    READ_COUNTS,
    SWAP,
    UPDATE,
    Program,
    gather_name,
    names_for,
    programs_of,
    sampler_name,
    step_name,
)
from rayserve_moe.execution.served_model import ServedModel, draft_sizes, probed_sizes, sampler_sizes
from rayserve_moe.execution.step.probe import Gather, Probe
from rayserve_moe.execution.step.pytrees import DeviceState, StepOutput, StepShape
from rayserve_moe.execution.step.samples import CompiledSampler
from rayserve_moe.execution.weights.migration import MigrationPrograms
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.kernels.table import CPU_NATIVE, Kernels
from rayserve_moe.observability.progress import report
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_THREADS = 4
NICENESS = 10
"""Niceness of the compiling thread: steps come first, and it still progresses beside them."""
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState, `vectors_NW` and `blocks`."""
CompiledDraft = Callable[..., tuple[DeviceState, jax.Array]]
"""Takes ModelWeights, DeviceState and `rows_NS`."""
CompiledUpdate = Callable[[DeviceState, np.ndarray], DeviceState]
Launched = Callable[[], StepOutput]
"""Waits for a call that was launched; returns what it returned, or raises what it raised."""
Launch = Callable[[Callable[[], StepOutput]], Launched]
"""Runs calls one after the other, in the order in which they were given."""


@dataclass(frozen=True)
class CompileTimes:
    """What compiling took: by the wall, and added up over programs by the clock of each; how many were on disk."""

    wall_s: float
    sum_s: float
    num_programs: int
    num_found: int


@dataclass(frozen=True)
class CompiledPrograms:
    """Everything that runs on the devices: steps, changes of rows, of their logits, of pages, and drafts by rows.

    `samplers` draw held samples, if any are held, by the single tokens of a step and whether they find evidence too.
    `gathers` take the probed tokens of a step, by its number of tokens, and `probe` says what the model makes of them.
    Steps, samplers and gathers may lack shapes, which `compile_shape` adds later.
    """

    steps: dict[StepShape, CompiledStep]
    samplers: dict[tuple[int, bool], CompiledSampler]
    update: CompiledUpdate
    adjust: CompiledUpdate
    copy: CompiledUpdate
    read_counts: Callable[[jax.Array], jax.Array]
    migration: MigrationPrograms | None
    drafts: dict[int, CompiledDraft]
    gathers: dict[int, Gather]
    probe: Probe
    times: CompileTimes

    @property
    def changes(self) -> tuple[CompiledUpdate, CompiledUpdate]:
        """What changes rows ahead of a step (`updates_of`)."""
        return self.update, self.adjust


class CompilationCount:
    """Counts the programs that this process compiles, including those of other callers, but for threads that compile
    as planned."""

    def __init__(self) -> None:
        self.total = 0
        self._planned: set[int] = set()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def start_over(self) -> None:
        """Count from zero again."""
        self.total = 0

    @contextmanager
    def planned(self) -> Generator[None]:
        """Do not count what this thread compiles inside."""
        thread = threading.get_ident()
        self._planned.add(thread)
        try:
            yield
        finally:
            self._planned.discard(thread)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        self.total += event == COMPILE_EVENT and threading.get_ident() not in self._planned


def compile_programs(
    programs: Sequence[Program], compile_one: Callable[[Program], Any], *, num_threads: int = NUM_THREADS
) -> dict[str, Any]:
    """What `compile_one` makes of every program, by name; several at a time, and without jax's own cache."""
    with without_cache_of_jax(), ThreadPoolExecutor(max_workers=num_threads) as pool:
        return dict(zip([each.name for each in programs], pool.map(compile_one, programs), strict=True))


def lowered(program: Program, plan: ParallelPlan) -> jax.stages.Lowered:
    """A program as XLA is given it."""

    def run(*args: Any, **named: Any) -> Any:
        return program.run(*args, **named)

    run.__name__ = program.name  # a profile, and what the compiler writes, name it so
    # Kernels ask the current mesh which chip they are compiled for.
    with jax.set_mesh(plan.mesh):
        return jax.jit(run, donate_argnums=program.donated).lower(*program.arguments, **program.inputs)


def optimized(
    lowered: jax.stages.Lowered, plan: ParallelPlan, *, kernels: Kernels | None = None
) -> jax.stages.Compiled:
    """Return the program for the devices of `plan`, compiled as its `kernels` want it.

    Raises: JaxRuntimeError with the compiler's reason.
    """
    options = unset_compiler_options({} if kernels is None else kernels.compiler_options)
    options |= COMPILER_OPTIONS_OF_PLATFORM.get(platform_of(plan.mesh), {})
    return lowered.compile(compiler_options=options or None)


def compile_served(
    served: ServedModel,
    *,
    num_pages: int,
    kept: KeptPrograms | None = None,
    shapes: Sequence[StepShape] | None = None,
) -> CompiledPrograms:
    """Compile a server's programs but those that are `kept`. Of steps, and what goes with them, it compiles those of
    `shapes`; None: all."""
    started, compiler = time.perf_counter(), _Compiler(served, kept)
    programs = programs_of(served, num_pages=num_pages)
    if shapes is not None:
        left_out = set().union(*(names_for(shape, served) for shape in served.shapes))
        left_out -= set().union(*(names_for(shape, served) for shape in shapes))
        programs = [program for program in programs if program.name not in left_out]
    compiler.total = len(programs)
    compiled = compile_programs(programs, compiler.compile)
    migration = None if served.staging is None else MigrationPrograms(compiled[FETCH], compiled[SWAP])
    steps = {shape: compiled[name] for shape in served.shapes if (name := step_name(shape)) in compiled}
    samplers = {size: compiled[name] for size in sampler_sizes(served) if (name := sampler_name(*size)) in compiled}
    seconds = compiler.seconds
    times = CompileTimes(time.perf_counter() - started, sum(seconds), len(seconds), compiler.num_found)
    drafts = {size: compiled[f"{DRAFT}_{size}"] for size in draft_sizes(served)}
    gathers = {size: compiled[name] for size in probed_sizes(served) if (name := gather_name(size)) in compiled}
    others = (compiled[name] for name in (UPDATE, ADJUST, COPY, READ_COUNTS))
    return CompiledPrograms(steps, samplers, *others, migration, drafts, gathers, compiled[PROBE], times)


def compile_shape(
    shape: StepShape, programs: CompiledPrograms, *, served: ServedModel, num_pages: int, kept: KeptPrograms | None
) -> CompileTimes:
    """Compile what `programs` lack for steps of a shape, one after the other, and add it."""
    started, compiler = time.perf_counter(), _Compiler(served, kept)
    present = {step_name(each) for each in programs.steps} | {sampler_name(*size) for size in programs.samplers}
    present |= {gather_name(size) for size in programs.gathers}
    names = names_for(shape, served) - present
    missing = [program for program in programs_of(served, num_pages=num_pages) if program.name in names]
    with without_cache_of_jax():
        compiled = {program.name: compiler.compile(program) for program in missing}
    for size in sampler_sizes(served):
        if (name := sampler_name(*size)) in compiled:
            programs.samplers[size] = compiled[name]
    if (name := gather_name(shape.num_tokens)) in compiled:
        programs.gathers[shape.num_tokens] = compiled[name]
    programs.steps[shape] = compiled[step_name(shape)]
    return CompileTimes(time.perf_counter() - started, sum(compiler.seconds), len(compiled), compiler.num_found)


def launch_for(devices: list[jax.Device]) -> Launch:
    """How to start programs on the local `devices`.

    A call returns before its program has run, so it is made at once. But on several emulated CPU devices a second
    call waits for the first program: there a thread makes the calls.
    """
    if devices[0].platform == "cpu" and len(devices) > 1:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch")
        return lambda call: pool.submit(call).result

    def launch(call: Callable[[], StepOutput]) -> Launched:
        output = call()
        return lambda: output

    return launch


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


class _Compiler:
    """Compiles for the devices of a model what is not `kept`, and records the seconds of every program."""

    def __init__(self, served: ServedModel, kept: KeptPrograms | None) -> None:
        self.seconds: list[float] = []
        self.num_found = 0
        self.total = 0
        """Number of programs to report progress against; 0: no reports."""
        self._plan, self._kernels, self._kept = served.config.plan, served.config.kernels, kept

    def compile(self, program: Program) -> Any:
        begun = time.perf_counter()
        signature = f"{signature_of(program.run, *program.arguments, **program.inputs)}\n{program.donated}"
        compiled = None if self._kept is None else self._kept.find(signature)
        if compiled is None:
            compiled = optimized(lowered(program, self._plan), self._plan, kernels=self._kernels)
            if self._kept is not None:
                self._kept.keep(signature, compiled)
        else:
            self.num_found += 1
        self.seconds.append(time.perf_counter() - begun)
        if self.total:
            report("compiling", len(self.seconds), total=self.total, detail=f"{self.num_found} found on disk")
        return compiled
