"""Programs of a server before compilation: functions, and shapes of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from rayserve_moe.decoding.logit_processors import processed_size
from rayserve_moe.decoding.masks import mask_words
from rayserve_moe.execution.drafts.steps import draft_ahead
from rayserve_moe.execution.served_model import (
    ServedModel,
    draft_sizes,
    probed_sizes,
    resident_adapters,
    sampler_sizes,
    single_adapter,
)
from rayserve_moe.execution.step.device_state import block_input_shapes
from rayserve_moe.execution.step.function import (
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
from rayserve_moe.execution.step.inputs import InputLayout
from rayserve_moe.execution.step.page_copies import COPIES_SIZE
from rayserve_moe.execution.step.page_moves import MAX_MOVES, moved_shapes, num_places, read_pages, write_pages
from rayserve_moe.execution.step.probe import MAX_PROBED, gather_tokens, probe_tokens
from rayserve_moe.execution.step.pytrees import DeviceState, StepConfig, StepShape
from rayserve_moe.execution.step.row_updates import ADJUSTMENT_SIZE, VECTOR_SIZE
from rayserve_moe.execution.step.samples import HeldInputs
from rayserve_moe.execution.weights.adapters import EXPERTS, layer_shapes, put_adapter, put_layer
from rayserve_moe.execution.weights.migration import expert_state, fetch, idle_vectors, read_counts, swap
from rayserve_moe.model.transformer import words_of
from rayserve_moe.requests.fields import MAX_LISTED_IDS

DRAFT, GATHER, PROBE = "draft", "gather", "probe"
UPDATE, ADJUST, COPY, READ_COUNTS = "update_rows", "adjust_rows", "copy_pages", "read_counts"
"""Names of programs other than steps."""
PUT_ADAPTER, PUT_LAYER = "put_adapter", "put_adapter_layer"
"""Names of the programs that change the resident adapters."""
READ_PAGES, WRITE_PAGES = "read_pages", "write_pages"
"""Names of the programs that copy pages to host memory and back."""
FETCH, SWAP = "fetch_slots", "swap_layer"
"""Names of the programs of a migration."""


@dataclass(frozen=True)
class Program:
    """A program of a server before compilation."""

    name: str
    run: partial[Any]
    arguments: tuple[Any, ...]
    """Shapes of positional arguments."""
    inputs: dict[str, Any]
    """Shapes of keyword arguments."""
    donated: int | None = None
    """Index of the donated argument."""
    shape: StepShape | None = None
    """Shape of a step; None for other programs."""


def programs_of(served: ServedModel, *, num_pages: int) -> list[Program]:
    """Return all programs of a server, the largest steps first. Nothing else runs on its devices."""
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
        *(_gather_program(size, served, config=config) for size in probed_sizes(served)),
        _probe_program(served, config=config),
        *_adapter_programs(served, config=config),
        *_page_programs(served, config=config, state=state),
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


def _adapter_programs(served: ServedModel, *, config: StepConfig) -> Iterator[Program]:
    """Yield the programs that change the resident adapters, if the server has any."""
    stacks, rows = resident_adapters(served), layer_shapes(served)
    if stacks is None:
        return
    given = {"adapter": single_adapter(served), "slot": _integers(served)}
    yield Program(PUT_ADAPTER, partial(put_adapter, config=config.model), (stacks,), given, donated=0)
    if rows is not None:
        given = {"rows": rows, "layer": _integers(served)}
        yield Program(PUT_LAYER, partial(put_layer, config=config.model), (stacks[EXPERTS],), given, donated=0)


def step_name(shape: StepShape) -> str:
    """Return the name of the step of a shape, by the tokens of a data rank."""
    ending = ("_adapters" if shape.num_adapters else "") + ("_rest" if shape.drafts_rest else "")
    if shape.num_blocks:
        return f"prefill_{shape.num_blocks * shape.block_tokens}{ending}"
    return f"decode_{shape.num_singles}{ending}"


def sampler_name(num_singles: int, has_evidence: bool) -> str:
    """Return the name of the program that draws deferred samples of a step with `num_singles` single tokens."""
    return f"evidence_{num_singles}" if has_evidence else f"sample_{num_singles}"


def gather_name(num_tokens: int) -> str:
    """Return the name of the program that gathers probed tokens of a step with `num_tokens` tokens."""
    return f"{GATHER}_{num_tokens}"


def names_for(shape: StepShape, served: ServedModel) -> set[str]:
    """Return the names of all programs that a plan in this shape may run, except for programs shared by all shapes."""
    samplers = {sampler_name(*size) for size in sampler_sizes(served) if size[0] == shape.num_singles}
    gathers = {gather_name(size) for size in probed_sizes(served) if size == shape.num_tokens}
    return {step_name(shape), *samplers, *gathers}


def _step_program(shape: StepShape, served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    layout = InputLayout(
        shape,
        served.num_rows,
        served.num_tables,
        tells_nexts=served.draft is not None,
        max_together=config.max_together,
        num_columns=config.num_columns,
    )
    vectors = _integers(served, config.model.plan.data_size, len(layout.padding))
    blocks = block_input_shapes(shape, config.model, captures=config.captures) if shape.num_blocks else None
    run = partial(run_step, layout=layout, config=config)
    inputs = {"vectors_NW": vectors, "blocks": blocks}
    if shape.num_adapters:
        inputs["adapters"] = resident_adapters(served)
    return Program(step_name(shape), run, (served.weights, state), inputs, donated=1, shape=shape)


def _sample_program(size: tuple[int, bool], served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    plan, part, (num_singles, has_evidence) = config.model.plan, words_of(config.model), size
    count = plan.data_size * num_singles
    shape = count, part.num_parts * part.width
    logits = jax.ShapeDtypeStruct(shape, np.float32, sharding=plan.sharding(WORD_AXES))
    held = HeldInputs(
        _integers(served, plan.data_size, 3, num_singles),
        _integers(served, count, mask_words(part.num_words)),
        _integers(served, count, 1 + MAX_LISTED_IDS) if has_evidence else None,
        _integers(served, count, processed_size(served.processors)) if served.processors else None,
    )
    run = partial(sample_step, config=config)
    return Program(sampler_name(*size), run, (state, logits), {"held": held}, donated=0)


def _draft_program(size: int, served: ServedModel, *, config: StepConfig, state: DeviceState) -> Program:
    assert config.draft is not None, "no draft model is configured"
    partitions = weight_partitions(config.model, config.draft), state_partitions(config.model, config.draft)
    run = partial(draft_ahead, config=config.draft, num_drafts=config.max_drafts, partitions=partitions)
    inputs = {"rows_NS": _integers(served, config.model.plan.data_size, size)}
    return Program(f"{DRAFT}_{size}", run, (served.weights, state), inputs, donated=1)


def _gather_program(num_tokens: int, served: ServedModel, *, config: StepConfig) -> Program:
    plan = config.model.plan
    shape = plan.data_size * num_tokens, config.model.spec.hidden_size
    hidden = jax.ShapeDtypeStruct(shape, served.dtype, sharding=plan.sharding(ROW_AXES))
    inputs = {"places_P": _integers(served, MAX_PROBED)}
    return Program(gather_name(num_tokens), partial(gather_tokens, config=config), (served.weights, hidden), inputs)


def _probe_program(served: ServedModel, *, config: StepConfig) -> Program:
    shape = MAX_PROBED, config.model.spec.hidden_size
    normed = jax.ShapeDtypeStruct(shape, served.dtype, sharding=config.model.plan.replicated())
    inputs = {
        "targets_P": _integers(served, MAX_PROBED),
        "listed_PL": _integers(served, MAX_PROBED, MAX_LISTED_IDS),
        "num_top": _integers(served),
    }
    return Program(PROBE, partial(probe_tokens, config=config), (served.weights, normed), inputs)


def _page_programs(served: ServedModel, *, config: StepConfig, state: DeviceState) -> Iterator[Program]:
    """Yield the programs that copy pages to host memory and back, if the server keeps pages there."""
    if served.settings.cache.host_mib:
        places = _integers(served, config.model.plan.data_size, MAX_MOVES, num_places(config))
        given = {"pages": tuple(shape.rows for shape in moved_shapes(state, config))}
        yield Program(READ_PAGES, partial(read_pages, config=config), (state, places), {})
        yield Program(WRITE_PAGES, partial(write_pages, config=config), (state, places), given, donated=0)


def _integers(served: ServedModel, *shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an int32 array that is replicated on all devices."""
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=served.config.plan.replicated())
