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

from rayserve_moe.execution.adjustment_updates import ADJUSTMENT_SIZE, apply_adjustment
from rayserve_moe.execution.block_inputs import block_input_shapes
from rayserve_moe.execution.row_updates import VECTOR_SIZE, apply_update
from rayserve_moe.execution.step import RowUpdate, StepRule, run_step, update_rows
from rayserve_moe.execution.step_input import InputLayout
from rayserve_moe.execution.step_types import DeviceState, ModelWeights, StepOutput, StepShape
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
FOUND_EVENT = "/jax/compilation_cache/cache_hits"
NUM_THREADS = 4
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState, `vectors_NW` and `blocks`."""
CompiledUpdate = Callable[[DeviceState, np.ndarray], DeviceState]


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
    times: CompileTimes


class CompilationCount:
    """Counts every program this process compiles, whoever asks for it, and those of them that it found on disk."""

    def __init__(self) -> None:
        self.total = self.num_found = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        self.total += event == COMPILE_EVENT

    def _on_event(self, event: str, **_: Any) -> None:
        self.num_found += event == FOUND_EVENT


def compile_programs(
    weights: ModelWeights,
    state: DeviceState,
    *,
    layouts: dict[StepShape, InputLayout],
    rule: StepRule,
    count: CompilationCount,
) -> CompiledPrograms:
    """Compile the step for every shape and the updates of rows, several at a time, the largest first."""
    started, num_found = time.perf_counter(), count.num_found
    plan, seconds = rule.model.plan, []
    platform = plan.mesh.devices.flat[0].platform

    def replicated(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=plan.replicated())

    def compile_for(jitted: Any, *args: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        compiled = jitted.lower(*args, **named).compile(compiler_options=COMPILER_OPTIONS_OF_PLATFORM.get(platform))
        seconds.append(time.perf_counter() - begun)
        return compiled

    def compile_step(layout: InputLayout) -> CompiledStep:
        vectors = replicated(plan.data_size, len(layout.padding))
        jitted = jax.jit(partial(run_step, layout=layout, rule=rule), donate_argnums=1)
        blocks = block_input_shapes(layout.shape, rule.model) if layout.shape.num_blocks else None
        return compile_for(jitted, weights, state, vectors_NW=vectors, blocks=blocks)

    def compile_update(apply: RowUpdate, size: int) -> CompiledUpdate:
        jitted = jax.jit(partial(update_rows, apply=apply, rule=rule), donate_argnums=0)
        return compile_for(jitted, state, replicated(size))

    largest_first = sorted(layouts, key=lambda shape: -shape.num_tokens)
    with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        steps = {shape: pool.submit(compile_step, layouts[shape]) for shape in largest_first}
        update = pool.submit(compile_update, apply_update, VECTOR_SIZE)
        adjust = pool.submit(compile_update, apply_adjustment, ADJUSTMENT_SIZE)
        compiled = {shape: step.result() for shape, step in steps.items()}
        compiled_updates = update.result(), adjust.result()
    times = CompileTimes(time.perf_counter() - started, sum(seconds), len(seconds), count.num_found - num_found)
    return CompiledPrograms(compiled, *compiled_updates, times)
