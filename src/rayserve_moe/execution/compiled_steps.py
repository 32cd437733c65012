"""The compiled programs: one step per shape, and the updates of rows. The only place that compiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.monitoring
import numpy as np

from rayserve_moe.decoding.logit_processors import processed_size
from rayserve_moe.decoding.masks import mask_words
from rayserve_moe.execution.compile_cache import KeptPrograms, signature_of, without_cache_of_jax
from rayserve_moe.execution.device_state import block_input_shapes
from rayserve_moe.execution.draft_steps import draft_ahead
from rayserve_moe.execution.inspection import TOKENS_AT_ONCE, CompiledInspection, inspect_tokens
from rayserve_moe.execution.migration import (
    MigrationPrograms,
    expert_state,
    fetch,
    idle_vectors,
    read_counts,
    swap,
)
from rayserve_moe.execution.page_copies import COPIES_SIZE
from rayserve_moe.execution.row_updates import ADJUSTMENT_SIZE, VECTOR_SIZE
from rayserve_moe.execution.served_model import ServedModel, draft_sizes, inspected_sizes, sampler_sizes
from rayserve_moe.execution.step import (
    ROW_AXES,
    WORD_AXES,
    adjust_rows,
    copy_pages,
    run_step,
    sample_step,
    state_partitions,
    update_rows,
    weight_partitions,
)
from rayserve_moe.execution.step_input import InputLayout
from rayserve_moe.execution.step_samples import HeldInputs
from rayserve_moe.execution.step_types import DeviceState, StepConfig, StepOutput, StepShape
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.model.transformer import words_of
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.request_fields import MAX_LISTED_IDS

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
NUM_THREADS = 4
DRAFT, INSPECT = "draft", "inspect"
UPDATE, ADJUST, COPY, READ_COUNTS = "update_rows", "adjust_rows", "copy_pages", "read_counts"
FETCH, SWAP = "fetch_slots", "swap_layer"
"""Names of the programs that are no steps."""
CompiledStep = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes ModelWeights, DeviceState, `vectors_NW` and `blocks`."""
CompiledSampler = Callable[..., tuple[DeviceState, StepOutput]]
"""Takes DeviceState, `logits_AV` of a step and `held`."""
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
    `inspections` look at tokens of a step, by its number of them; there are none where hidden states are not shown.
    """

    steps: dict[StepShape, CompiledStep]
    samplers: dict[tuple[int, bool], CompiledSampler]
    update: CompiledUpdate
    adjust: CompiledUpdate
    copy: CompiledUpdate
    read_counts: Callable[[jax.Array], jax.Array]
    migration: MigrationPrograms | None
    drafts: dict[int, CompiledDraft]
    inspections: dict[int, CompiledInspection]
    times: CompileTimes

    @property
    def changes(self) -> tuple[CompiledUpdate, CompiledUpdate]:
        """What changes rows ahead of a step (`updates_of`)."""
        return self.update, self.adjust


@dataclass(frozen=True)
class Program:
    """One of a server's programs before it is compiled: a function, shapes of what it is called with, positional
    `arguments` and `inputs` by name, and which of the arguments it takes for its own; of a step its shape."""

    name: str
    run: partial[Any]
    arguments: tuple[Any, ...]
    inputs: dict[str, Any]
    donated: int | None = None
    shape: StepShape | None = None


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


def programs_of(served: ServedModel, *, num_pages: int) -> list[Program]:
    """Everything that a server compiles, the largest steps first. Nothing else runs on its devices."""
    config, state, weights = served.step_config(num_pages), served.state(num_pages), served.weights
    largest_first = sorted(served.shapes, key=lambda shape: -shape.num_tokens)
    steps = [_step_program(shape, served, config=config, state=state) for shape in largest_first]

    def update_program(name: str, update: Callable[..., DeviceState], size: int) -> Program:
        return Program(name, partial(update, config=config), (state, _integers(served, size)), {}, donated=0)

    read = partial(read_counts, config=config.model)
    programs = [
        *steps,
        *(_sample_program(size, served, config=config, state=state) for size in sampler_sizes(served)),
        update_program(UPDATE, update_rows, VECTOR_SIZE),
        update_program(ADJUST, adjust_rows, ADJUSTMENT_SIZE),
        update_program(COPY, copy_pages, COPIES_SIZE),
        Program(READ_COUNTS, read, (state.expert_counts_ME,), {}),
        *(_draft_program(size, served, config=config, state=state) for size in draft_sizes(served)),
        *(_inspection_program(size, served, config=config) for size in inspected_sizes(served)),
    ]
    if served.staging is None:
        return programs
    held = expert_state(weights, config=config.model), served.staging
    vectors = idle_vectors(config.model, slots_per_step=served.settings.balancing.slots_per_step)
    to_fetch, to_swap = ({"vector": _integers(served, len(vector))} for vector in vectors)
    return [
        *programs,
        Program(FETCH, partial(fetch, config=config.model), held, to_fetch, donated=1),
        Program(SWAP, partial(swap, config=config.model), held, to_swap, donated=0),
    ]


def step_name(shape: StepShape) -> str:
    """Name of the step of a shape, by the tokens of a data rank."""
    return f"prefill_{shape.num_blocks * shape.block_tokens}" if shape.num_blocks else f"decode_{shape.num_singles}"


def sampler_name(num_singles: int, has_evidence: bool) -> str:
    """Name of the program that draws held samples of a step with so many single tokens."""
    return f"evidence_{num_singles}" if has_evidence else f"sample_{num_singles}"


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


def optimized(lowered: jax.stages.Lowered, plan: ParallelPlan) -> jax.stages.Compiled:
    """The program for the devices of `plan`. JaxRuntimeError holds the compiler's reason where there can be none."""
    return lowered.compile(compiler_options=COMPILER_OPTIONS_OF_PLATFORM.get(platform_of(plan.mesh)))


def compile_served(served: ServedModel, *, num_pages: int, kept: KeptPrograms | None = None) -> CompiledPrograms:
    """Compile all of a server's programs but those that are `kept`."""
    started, compiler = time.perf_counter(), _Compiler(served.config.plan, kept)
    compiled = compile_programs(programs_of(served, num_pages=num_pages), compiler.compile)
    migration = None if served.staging is None else MigrationPrograms(compiled[FETCH], compiled[SWAP])
    steps = {shape: compiled[step_name(shape)] for shape in served.shapes}
    samplers = {size: compiled[sampler_name(*size)] for size in sampler_sizes(served)}
    seconds = compiler.seconds
    times = CompileTimes(time.perf_counter() - started, sum(seconds), len(seconds), compiler.num_found)
    drafts = {size: compiled[f"{DRAFT}_{size}"] for size in draft_sizes(served)}
    inspections = {size: compiled[f"{INSPECT}_{size}"] for size in inspected_sizes(served)}
    others = (compiled[name] for name in (UPDATE, ADJUST, COPY, READ_COUNTS))
    return CompiledPrograms(steps, samplers, *others, migration, drafts, inspections, times)


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
        self._plan, self._kept = plan, kept

    def compile(self, program: Program) -> Any:
        begun = time.perf_counter()
        signature = f"{signature_of(program.run, *program.arguments, **program.inputs)}\n{program.donated}"
        compiled = None if self._kept is None else self._kept.find(signature)
        if compiled is None:
            compiled = optimized(lowered(program, self._plan), self._plan)
            if self._kept is not None:
                self._kept.keep(signature, compiled)
        else:
            self.num_found += 1
        self.seconds.append(time.perf_counter() - begun)
        return compiled


def _step_program(shape: StepShape, served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    asked = served.draft is not None, config.tree is not None, config.most_together
    layout = InputLayout(shape, served.num_rows, served.num_tables, *asked)
    vectors = _integers(served, config.model.plan.data_size, len(layout.padding))
    blocks = block_input_shapes(shape, config.model) if shape.num_blocks else None
    run = partial(run_step, layout=layout, config=config)
    inputs = {"vectors_NW": vectors, "blocks": blocks}
    return Program(step_name(shape), run, (served.weights, state), inputs, donated=1, shape=shape)


def _sample_program(size: tuple[int, bool], served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    plan, part, (num_singles, has_evidence) = config.model.plan, words_of(config.model), size
    count = plan.data_size * num_singles
    shape = count, part.num_parts * part.width
    logits = jax.ShapeDtypeStruct(shape, np.float32, sharding=plan.sharding(WORD_AXES))
    held = HeldInputs(
        _integers(served, plan.data_size, 3 + (config.tree is not None), num_singles),
        _integers(served, count, mask_words(part.num_words)),
        _integers(served, count, 1 + MAX_LISTED_IDS) if has_evidence else None,
        _integers(served, count, processed_size(served.processors)) if served.processors else None,
    )
    run = partial(sample_step, config=config)
    return Program(sampler_name(*size), run, (state, logits), {"held": held}, donated=0)


def _draft_program(size: int, served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    assert config.draft is not None, "there is no draft model"
    partitions = weight_partitions(config.model, config.draft), state_partitions(config.model, config.draft)
    run = partial(draft_ahead, config=config.draft, shape=config.drafting, partitions=partitions)
    inputs = {"rows_NS": _integers(served, config.model.plan.data_size, size)}
    return Program(f"{DRAFT}_{size}", run, (served.weights, state), inputs, donated=1)


def _inspection_program(num_tokens: int, served: ServedModel, *, config: StepConfig) -> Program:
    plan = config.model.plan
    shape = plan.data_size * num_tokens, config.model.spec.hidden_size
    hidden = jax.ShapeDtypeStruct(shape, served.dtype, sharding=plan.sharding(ROW_AXES))
    sizes = {"places_P": (TOKENS_AT_ONCE,), "listed_PL": (TOKENS_AT_ONCE, MAX_LISTED_IDS)}
    inputs = {name: _integers(served, *shape) for name, shape in sizes.items()}
    return Program(f"{INSPECT}_{num_tokens}", partial(inspect_tokens, config=config), (served.weights, hidden), inputs)


def _integers(served: ServedModel, *shape: int) -> jax.ShapeDtypeStruct:
    """The shape of int32 numbers that every device gets."""
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=served.config.plan.replicated())
