"""The compiled steps, one per shape: the only place that compiles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.monitoring
import numpy as np

from rayserve_moe.decoding.sampling import SamplingBatch
from rayserve_moe.execution.step import run_step
from rayserve_moe.execution.step_types import DeviceState, StepInput, StepOutput, StepShape, as_device
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.model.transformer import ModelRule, Parameters

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CompiledStep = Callable[[Parameters, DeviceState, StepInput], tuple[DeviceState, StepOutput]]


class CompilationCount:
    """Counts every program this process compiles, whoever asks for it."""

    def __init__(self) -> None:
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        self.total += event == COMPILE_EVENT


def compile_steps(
    params: Parameters,
    state: DeviceState,
    *,
    shapes: tuple[StepShape, ...],
    rule: ModelRule,
    capture_routing: bool,
    pages_per_row: int,
) -> dict[StepShape, CompiledStep]:
    """Compile the step for every shape, two at a time."""

    def step(params: Parameters, state: DeviceState, step_input: StepInput) -> tuple[DeviceState, StepOutput]:
        return run_step(params, state, step=step_input, rule=rule, capture_routing=capture_routing)

    jitted = jax.jit(step, donate_argnums=1)
    replicated = rule.plan.replicated()

    def abstract(array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated)

    def compile_one(shape: StepShape) -> CompiledStep:
        step_input = jax.tree.map(abstract, empty_input(shape, pages_per_row=pages_per_row))
        return jitted.lower(params, state, step_input).compile()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(shapes, pool.map(compile_one, shapes), strict=True))


def empty_input(shape: StepShape, *, pages_per_row: int) -> StepInput:
    """A step of this shape in which every token is padding."""
    tokens, rows = shape.num_tokens, shape.num_singles
    page_table = as_device(np.zeros((rows + shape.num_blocks, pages_per_row), np.int32))
    zeros = as_device(np.zeros(tokens, np.int32))
    batch = TokenBatch(zeros, zeros - 1, zeros, page_table, num_singles=rows)
    floats = [as_device(np.zeros(rows, np.float32)) for _ in range(3)]
    integers = [as_device(np.zeros(rows, np.uint32)) for _ in range(3)]
    indices = as_device(np.zeros(rows, np.int32))
    return StepInput(batch, indices, SamplingBatch(*floats, *integers, indices))
