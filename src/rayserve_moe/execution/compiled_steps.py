"""The compiled programs: one step per shape, and the update of rows. The only place that compiles."""

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

from rayserve_moe.execution.row_updates import VECTOR_SIZE
from rayserve_moe.execution.step import StepRule, run_step, update_rows
from rayserve_moe.execution.step_input import InputLayout
from rayserve_moe.execution.step_types import DeviceState, ModelWeights, StepOutput, StepShape

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState and `vectors_NW`."""
CompiledUpdate = Callable[[DeviceState, np.ndarray], DeviceState]


@dataclass(frozen=True)
class CompiledPrograms:
    """Everything that runs on the devices; `seconds` is what compiling took."""

    steps: dict[StepShape, CompiledStep]
    update: CompiledUpdate
    seconds: float


class CompilationCount:
    """Counts every program this process compiles, whoever asks for it."""

    def __init__(self) -> None:
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        self.total += event == COMPILE_EVENT


def compile_programs(
    weights: ModelWeights,
    state: DeviceState,
    *,
    layouts: dict[StepShape, InputLayout],
    rule: StepRule,
    num_threads: int,
) -> CompiledPrograms:
    """Compile the step for every shape and the update of rows, several at a time, the largest first."""
    started = time.perf_counter()
    plan = rule.model.plan

    def replicated(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=plan.replicated())

    def compile_step(layout: InputLayout) -> CompiledStep:
        vectors = replicated(plan.data_size, len(layout.padding))
        jitted = jax.jit(partial(run_step, layout=layout, rule=rule), donate_argnums=1)
        return jitted.lower(weights, state, vectors_NW=vectors).compile()

    def compile_update() -> CompiledUpdate:
        return (
            jax.jit(partial(update_rows, rule=rule), donate_argnums=0).lower(state, replicated(VECTOR_SIZE)).compile()
        )

    largest_first = sorted(layouts, key=lambda shape: -shape.num_tokens)
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        steps = {shape: pool.submit(compile_step, layouts[shape]) for shape in largest_first}
        update = pool.submit(compile_update)
        compiled = {shape: step.result() for shape, step in steps.items()}
        return CompiledPrograms(compiled, update.result(), time.perf_counter() - started)
