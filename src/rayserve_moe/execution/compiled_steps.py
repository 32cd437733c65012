"""The compiled programs: one step per shape, and the updates of rows. The only place that compiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.monitoring
import numpy as np

from rayserve_moe.execution.compile_cache import KeptPrograms, signature_of, without_cache_of_jax
from rayserve_moe.execution.device_state import block_input_shapes
from rayserve_moe.execution.migration import (
    MigrationPrograms,
    MigrationRunner,
    expert_state,
    fetch,
    idle_vectors,
    read_counts,
    swap,
)
from rayserve_moe.execution.row_updates import ADJUSTMENT_SIZE, VECTOR_SIZE, apply_adjustment, apply_update
from rayserve_moe.execution.step import RowUpdate, StepConfig, run_step, update_rows
from rayserve_moe.execution.step_input import InputLayout
from rayserve_moe.execution.step_types import DeviceState, ModelWeights, StepOutput, StepShape
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.model.transformer import ModelConfig
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_THREADS = 4
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState, `vectors_NW` and `blocks`."""
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
    """Everything that runs on the devices: steps, changes of rows, and what adjusts the logits of a row."""

    steps: dict[StepShape, CompiledStep]
    update: CompiledUpdate
    adjust: CompiledUpdate
    read_counts: Callable[[jax.Array], jax.Array]
    migration: MigrationPrograms | None
    times: CompileTimes


class CompilationCount:
    """Counts every program that this process compiles, including those of other callers."""

    def __init__(self) -> None:
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def start_over(self) -> None:
        """Count from zero again."""
        self.total = 0

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        self.total += event == COMPILE_EVENT


def compile_programs(
    weights: ModelWeights,
    state: DeviceState,
    *,
    layouts: dict[StepShape, InputLayout],
    config: StepConfig,
    kept: KeptPrograms | None = None,
    mover: MigrationRunner | None = None,
) -> CompiledPrograms:
    """Compile the step for every shape and the updates of rows, several at a time, the largest first.

    With a `mover` also the programs that move experts; the weights need maps then. Programs that are `kept` are not
    compiled.
    """
    started, compiler = time.perf_counter(), _Compiler(config.model.plan, kept)

    def compile_step(layout: InputLayout) -> CompiledStep:
        vectors = compiler.integers(config.model.plan.data_size, len(layout.padding))
        run = partial(run_step, layout=layout, config=config)
        blocks = block_input_shapes(layout.shape, config.model) if layout.shape.num_blocks else None
        return compiler.compile(run, weights, state, donated=1, vectors_NW=vectors, blocks=blocks)

    def compile_update(apply: RowUpdate, size: int) -> CompiledUpdate:
        return compiler.compile(
            partial(update_rows, apply=apply, config=config), state, compiler.integers(size), donated=0
        )

    largest_first = sorted(layouts, key=lambda shape: -shape.num_tokens)
    with without_cache_of_jax(), ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        steps = {shape: pool.submit(compile_step, layouts[shape]) for shape in largest_first}
        update = pool.submit(compile_update, apply_update, VECTOR_SIZE)
        adjust = pool.submit(compile_update, apply_adjustment, ADJUSTMENT_SIZE)
        compiled = {shape: step.result() for shape, step in steps.items()}
        compiled_updates = update.result(), adjust.result()
        read = compiler.compile(partial(read_counts, config=config.model), state.expert_counts_ME)
        migration = None
        if mover is not None:
            migration = _compile_migration(compiler, weights, mover=mover, config=config.model)
    seconds = compiler.seconds
    times = CompileTimes(time.perf_counter() - started, sum(seconds), len(seconds), compiler.num_found)
    return CompiledPrograms(compiled, *compiled_updates, read, migration, times)


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


class _Compiler:
    """Compiles for the devices of `plan` what is not `kept`, and notes the seconds of every program."""

    def __init__(self, plan: ParallelPlan, kept: KeptPrograms | None) -> None:
        self.seconds: list[float] = []
        self.num_found = 0
        self._replicated, self._kept = plan.replicated(), kept
        self._options = COMPILER_OPTIONS_OF_PLATFORM.get(platform_of(plan.mesh))

    def integers(self, *shape: int) -> jax.ShapeDtypeStruct:
        """The shape of int32 numbers that every device gets."""
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._replicated)

    def compile(self, run: partial[Any], *args: Any, donated: int | None = None, **named: Any) -> Any:
        """The program of `run` for arguments like these, of which it takes one for its own where that is `donated`."""
        begun = time.perf_counter()
        signature = f"{signature_of(run, *args, **named)}\n{donated}"
        compiled = None if self._kept is None else self._kept.find(signature)
        if compiled is None:
            jitted = jax.jit(run, donate_argnums=donated)
            compiled = jitted.lower(*args, **named).compile(compiler_options=self._options)
            if self._kept is not None:
                self._kept.keep(signature, compiled)
        else:
            self.num_found += 1
        self.seconds.append(time.perf_counter() - begun)
        return compiled


def _compile_migration(
    compiler: _Compiler, weights: ModelWeights, *, mover: MigrationRunner, config: ModelConfig
) -> MigrationPrograms:
    held, staging = expert_state(weights, config=config), mover.staging
    to_fetch, to_swap = idle_vectors(config, slots_per_step=mover.slots_per_step)
    fetching, swapping = (partial(run, config=config) for run in (fetch, swap))
    return MigrationPrograms(
        compiler.compile(fetching, held, staging, donated=1, vector=compiler.integers(len(to_fetch))),
        compiler.compile(swapping, held, staging, donated=0, vector=compiler.integers(len(to_swap))),
    )
