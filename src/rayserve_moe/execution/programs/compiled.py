"""Compilation of a server's programs, at its start and beside its steps. The only place that compiles.

A server may start with the smallest and the largest shape of each kind: together they hold every step. The other shapes
save padding. They compile beside the steps, in sequence, and are used once all of their programs are ready. This
applies to native kernels on a single host, whose rows have the same bits in every shape. Hosts of a group must choose
the same shape, and start with all shapes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring
import numpy as np

from rayserve_moe.config.load import unset_compiler_options
from rayserve_moe.execution.page_store import PagePrograms
from rayserve_moe.execution.programs.cache import KeptPrograms, program_key, without_cache_of_jax
from rayserve_moe.execution.programs.specs import (
    ADJUST,
    COPY,
    DRAFT,
    FETCH,
    PROBE,
    PUT_ADAPTER,
    PUT_LAYER,
    READ_COUNTS,
    READ_PAGES,
    SWAP,
    UPDATE,
    WRITE_PAGES,
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
from rayserve_moe.execution.weights.adapters import AdapterPrograms
from rayserve_moe.execution.weights.migration import MigrationPrograms
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM, MATMUL_PRECISION_OF_PLATFORM
from rayserve_moe.kernels.table import CPU_NATIVE
from rayserve_moe.observability.progress import report
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_THREADS = 4
NICENESS = 10
"""Niceness of the compiling thread: steps take precedence, and it still progresses beside them."""
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState, `vectors_NW` and `blocks`."""
CompiledDraft = Callable[..., tuple[DeviceState, jax.Array]]
"""Takes ModelWeights, DeviceState and `rows_NS`."""
CompiledUpdate = Callable[[DeviceState, np.ndarray], DeviceState]
Launched = Callable[[], Any]
"""Waits for a launched call; returns its result or raises its error."""
Launch = Callable[[Callable[[], Any]], Launched]
"""Runs calls in the order in which they are given."""


@dataclass(frozen=True)
class CompileTimes:
    """Times and numbers of compilation."""

    wall_s: float
    """Wall-clock seconds."""
    sum_s: float
    """Sum of the seconds of all programs."""
    num_programs: int
    """Number of programs."""
    num_found: int
    """Number of programs that were found on disk."""


@dataclass(frozen=True)
class CompiledPrograms:
    """Everything that runs on the devices.

    Steps, samplers and gathers may lack shapes, which `compile_shape` adds later.
    """

    steps: dict[StepShape, CompiledStep]
    samplers: dict[tuple[int, bool], CompiledSampler]
    """Programs that draw deferred samples, by the number of single tokens and whether they compute evidence."""
    update: CompiledUpdate
    """Changes rows."""
    adjust: CompiledUpdate
    """Changes the logit adjustments of rows."""
    copy: CompiledUpdate
    """Copies pages."""
    read_counts: Callable[[jax.Array], jax.Array]
    migration: MigrationPrograms | None
    drafts: dict[int, CompiledDraft]
    """Draft programs by number of rows."""
    gathers: dict[int, Gather]
    """Programs that gather probed tokens, by the number of tokens of a step."""
    probe: Probe
    """Computes the columns of probed tokens."""
    times: CompileTimes
    adapters: AdapterPrograms | None = None
    """Programs that change the resident adapters; None on a server without."""
    pages: PagePrograms | None = None
    """Programs that copy pages to host memory and back; None without `host_cache_mib`."""

    @property
    def changes(self) -> tuple[CompiledUpdate, CompiledUpdate]:
        """Return the programs that change rows before a step (`updates_of`)."""
        return self.update, self.adjust


class CompilationCount:
    """Number of programs compiled in this process by any caller, except in threads that compile as planned."""

    def __init__(self) -> None:
        self.total = 0
        self._planned: set[int] = set()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def reset(self) -> None:
        """Reset the count to zero."""
        self.total = 0

    @contextmanager
    def planned(self) -> Generator[None]:
        """Exclude compilations of this thread inside the context."""
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
    """Return the results of `compile_one` for all programs, by name; several run at a time, without jax's own cache."""
    with without_cache_of_jax(), ThreadPoolExecutor(max_workers=num_threads) as pool:
        return dict(zip([each.name for each in programs], pool.map(compile_one, programs), strict=True))


def lowered(program: Program, plan: ParallelPlan) -> jax.stages.Lowered:
    """Return a program lowered for XLA."""

    def run(*args: Any, **named: Any) -> Any:
        return program.run(*args, **named)

    run.__name__ = program.name  # shown in profiles and compiler output
    # Kernels find the chip that they are compiled for in the current mesh.
    precision = MATMUL_PRECISION_OF_PLATFORM.get(platform_of(plan.mesh))
    with jax.set_mesh(plan.mesh), jax.default_matmul_precision(precision) if precision else nullcontext():
        return jax.jit(run, donate_argnums=program.donated).lower(*program.arguments, **program.inputs)


def optimized(
    lowered: jax.stages.Lowered, plan: ParallelPlan, *, kernels: Kernels | None = None
) -> jax.stages.Compiled:
    """Return the program compiled for the devices of `plan`, with the options of its `kernels`.

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
    """Compile a server's programs, except for programs found in `kept`.

    Steps, and the programs that depend on their shape, are only compiled for `shapes`; None: all.
    """
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
    put = compiled.get(PUT_ADAPTER)
    adapters = None if put is None else AdapterPrograms(put, compiled.get(PUT_LAYER))
    read = compiled.get(READ_PAGES)
    pages = None if read is None else PagePrograms(read, compiled[WRITE_PAGES])
    return CompiledPrograms(
        steps, samplers, *others, migration, drafts, gathers, compiled[PROBE], times, adapters, pages
    )


def compile_shape(
    shape: StepShape, programs: CompiledPrograms, *, served: ServedModel, num_pages: int, kept: KeptPrograms | None
) -> CompileTimes:
    """Compile the programs that are missing for steps of a shape, in sequence, and add them to `programs`."""
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
    """Return the function that starts programs on the local `devices`.

    A call returns before its program has run, so it is made directly. But on several emulated CPU devices a second call
    waits for the first program, so a thread makes the calls.
    """
    if devices[0].platform == "cpu" and len(devices) > 1:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch")
        return lambda call: pool.submit(call).result

    def launch(call: Callable[[], Any]) -> Launched:
        output = call()
        return lambda: output

    return launch


def first_shapes(served: ServedModel) -> tuple[StepShape, ...]:
    """Return the shapes that a server needs at its start, in the order of `served.shapes`."""
    if served.config.kernels.name != CPU_NATIVE.name or jax.process_count() > 1:
        return served.shapes
    needed = set[StepShape]()
    shapes = [shape for shape in served.shapes if not shape.drafts_rest]
    for num_adapters in {shape.num_adapters for shape in shapes}:
        alike = [shape for shape in shapes if shape.num_adapters == num_adapters]
        for kind in (False, True):
            of_kind = [shape for shape in alike if bool(shape.num_blocks) == kind]
            needed |= {of_kind[0], of_kind[-1]}
    return tuple(shape for shape in served.shapes if shape in needed)


class LaterShapes:
    """Compiles the shapes that `programs` lack in a separate thread, the smallest first."""

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
        """Start compiling; `use` receives all usable shapes whenever another shape is ready."""
        missing = [shape for shape in self._served.shapes if shape not in self._programs.steps]
        if not missing or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, args=(missing, use), name="later-shapes", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # XLA must not be compiling when its process ends

    def wait(self) -> None:
        """Wait until every shape is ready, or `stop` was called."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Compile no further programs; return when the current compilation is done."""
        self._stops.set()
        self.wait()
        atexit.unregister(self.stop)

    def _run(self, missing: Sequence[StepShape], use: Callable[[Sequence[StepShape]], None]) -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        started, num_programs, num_found = time.perf_counter(), 0, 0
        for shape in missing:
            if self._stops.is_set():
                return
            try:
                with self._count.planned():
                    times = self._compile(shape)
            except jax.errors.JaxRuntimeError as error:
                log.warning("steps of %d tokens do not compile, using a larger shape: %s", shape.num_tokens, error)
                continue
            num_programs, num_found = num_programs + times.num_programs, num_found + times.num_found
            use(tuple(each for each in self._served.shapes if each in self._programs.steps))
        counts = num_programs, time.perf_counter() - started, num_found
        log.info("%d more programs compiled in %.1f s beside the steps, %d found on disk", *counts)

    def _compile(self, shape: StepShape) -> CompileTimes:
        return compile_shape(shape, self._programs, served=self._served, num_pages=self._num_pages, kept=self._kept)


class _Compiler:
    """Compiles programs for a model's devices, unless they are `kept`, and records the seconds of every program."""

    def __init__(self, served: ServedModel, kept: KeptPrograms | None) -> None:
        self.seconds: list[float] = []
        self.num_found = 0
        self.total = 0
        """Number of programs to report progress against; 0: no reports."""
        self._plan, self._kernels, self._kept = served.config.plan, served.config.kernels, kept

    def compile(self, program: Program) -> Any:
        begun = time.perf_counter()
        key = f"{program_key(program.run, *program.arguments, **program.inputs)}\n{program.donated}"
        compiled = None if self._kept is None else self._kept.find(key)
        if compiled is None:
            compiled = optimized(lowered(program, self._plan), self._plan, kernels=self._kernels)
            if self._kept is not None:
                self._kept.keep(key, compiled)
        else:
            self.num_found += 1
        self.seconds.append(time.perf_counter() - begun)
        if self.total:
            report("compiling", len(self.seconds), total=self.total, detail=f"{self.num_found} found on disk")
        return compiled
