"""The programs of a server as functions and shapes to compile them for: no weights, no devices, nothing allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from rayserve_moe.config.derive import page_groups, pages_per_sequence
from rayserve_moe.config.settings import BalancingSettings, CacheSettings, ExpertSettings, SchedulerSettings
from rayserve_moe.execution.device_state import allocate_state, block_input_shapes
from rayserve_moe.execution.migration import expert_state, fetch, idle_vectors, staging_shapes, swap
from rayserve_moe.execution.step import StepConfig, run_step, state_partitions
from rayserve_moe.execution.step_input import InputLayout
from rayserve_moe.execution.step_types import DeviceState, ExpertState, ModelWeights, StepShape
from rayserve_moe.execution.weights import first_placement, model_config, parameter_tree
from rayserve_moe.experts.migration import SlotArrays
from rayserve_moe.experts.slot_mapping import PlacementArrays, placement_arrays
from rayserve_moe.kernels.kv_pool import LayerPages, num_tables
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.kv_cache import layer_pages_of, windows_of
from rayserve_moe.model.transformer import ModelConfig, Parameters
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS
from rayserve_moe.tools.hlo_report import Piece

LEAST_PIECE_BYTES = 64 << 10
"""Norms and biases are small enough to be copied."""


class TopologyError(ValueError):
    """A topology that the compiler does not know, or a layout that does not fit its devices."""


@dataclass(frozen=True)
class ServedSetting:
    """What is served on what. `batch` sequences of `context` tokens per data rank; 0 for dp or tp: what is left.

    `topology` is spelled as the compiler spells it, such as `v6e:2x4`.
    """

    topology: str
    dp: int = 0
    tp: int = 0
    redundant_experts: int = 0
    expert_backend: str = "auto"
    context: int = 4096
    batch: int = 16
    prefill_tokens: int = 8192
    page_size: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    capture_routing: bool = False
    expert_selection: str = "auto"


@dataclass(frozen=True)
class Program:
    """One program: a function of weights, state and named inputs, whose state is donated, and their shapes.

    `in_place` is the part of the state that must not be copied. A step takes `prompt_tokens` per data rank beside the
    sequences of the setting; None: it is no step.
    """

    name: str
    run: Callable[..., Any]
    weights: Any
    state: Any
    inputs: dict[str, Any]
    in_place: Any
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model laid out on a topology: its rule, and the shapes of all that lies on the devices."""

    setting: ServedSetting
    config: StepConfig
    weights: ModelWeights
    state: DeviceState

    @property
    def plan(self) -> ParallelPlan:
        return self.config.model.plan


def lay_out(config: Mapping[str, Any], setting: ServedSetting) -> ServedModel:
    """Lay the model of a `config.json` on a topology. ValueError says what does not fit together."""
    spec, plan = spec_from_config(config), _plan(setting)
    experts = ExpertSettings(
        setting.expert_backend, num_redundant=setting.redundant_experts, selection=setting.expert_selection
    )
    model = model_config(spec, plan, experts=experts)
    num_pages, layer_pages = _pages(model, setting)
    step = StepConfig(model, setting.page_size, setting.capture_routing, layer_pages=layer_pages)
    weights = ModelWeights(_parameters(model, setting.dtype), _maps(model), _capacity_factor(model))
    return ServedModel(setting, step, weights, _state(step, setting, num_pages=num_pages))


def programs_of(served: ServedModel) -> list[Program]:
    """All programs to look at: decode, and prefill steps that hold all rows besides, each without and with sampling.

    Where there are redundant experts, also both parts of a migration. Speculative steps belong into this list.
    """
    batch, block = served.setting.batch, PREFILL_BLOCK_TOKENS
    decode = StepShape(batch, 0, block)
    prefill = StepShape(batch, -(-served.setting.prefill_tokens // block), block)
    return [
        _program("decode_forward", decode, served=served, samples=False),
        _program("decode", decode, served=served),
        _program("prefill_forward", prefill, served=served, samples=False),
        _program("prefill", prefill, served=served),
        *_migration_programs(served),
    ]


def bytes_on_device(tree: object) -> int:
    """Bytes that the arrays of a tree of shapes take on one device."""
    return sum(_elements(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def pieces_of(served: ServedModel) -> list[Piece]:
    """What a program should read where it lies: a layer's weights by kind, and half of a layer's pages or more."""
    model, setting = served.config.model, served.setting
    pieces = []
    for group, specs in parameter_tree(model, dtype=setting.dtype).items():
        for spec in specs.values():
            local = model.plan.sharding(spec.axes).shard_shape(spec.shape)[spec.num_stacked_dims :]
            size = jnp.dtype(spec.dtype).itemsize
            num_elements = math.prod(local)
            if num_elements * size >= LEAST_PIECE_BYTES:
                pieces.append(Piece(group, _hlo_dtype(spec.dtype), local, num_elements))
    pool = served.state.kv_pages
    per_layer = _elements(pool) // model.spec.num_layers
    rows = pool.sharding.shard_shape(pool.shape)[2:]
    return [*pieces, Piece("kv", _hlo_dtype(setting.kv_dtype), rows, per_layer // 2, is_written=True)]


def _program(name: str, shape: StepShape, *, served: ServedModel, samples: bool = True) -> Program:
    layout = InputLayout(shape, served.setting.batch, num_tables(served.config.layer_pages))
    size = (served.plan.data_size, len(layout.padding))
    vectors_NW = jax.ShapeDtypeStruct(size, jnp.int32, sharding=served.plan.replicated())
    blocks = block_input_shapes(shape, served.config.model) if shape.num_blocks else None
    inputs = {"vectors_NW": vectors_NW, "blocks": blocks}
    program = partial(run_step, layout=layout, config=replace(served.config, samples=samples))
    tokens = shape.num_blocks * PREFILL_BLOCK_TOKENS
    return Program(name, program, served.weights, served.state, inputs, served.state.kv_pages, prompt_tokens=tokens)


def _migration_programs(served: ServedModel) -> Iterator[Program]:
    """What moves experts: fetching some slots into the staging area, and swapping a layer."""
    if served.weights.maps is None:
        return
    config = served.config.model
    held = expert_state(served.weights, config=config)
    staging = staging_shapes(config, dtype=served.setting.dtype)

    to_fetch, to_swap = (
        {"vector": jax.ShapeDtypeStruct(vector.shape, vector.dtype, sharding=served.plan.replicated())}
        for vector in idle_vectors(config, slots_per_step=BalancingSettings().slots_per_step)
    )

    def run_swap(staging: SlotArrays, held: ExpertState, *, vector: jax.Array) -> ExpertState:
        return swap(held, staging, vector=vector, config=config)

    yield Program("rebalance_fetch", partial(fetch, config=config), held, staging, to_fetch, staging)
    yield Program("rebalance_swap", run_swap, staging, held, to_swap, held)


def _plan(setting: ServedSetting) -> ParallelPlan:
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=setting.topology).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise TopologyError(f"topology {setting.topology}: {str(error).strip().splitlines()[0]}") from error
    dp = setting.dp or len(devices) // (setting.tp or 1)
    tp = setting.tp or len(devices) // dp
    if dp * tp != len(devices):
        raise TopologyError(f"dp {dp} times tp {tp} is not the {len(devices)} devices of {setting.topology}")
    return plan_for(list(devices), data_size=dp)


def _parameters(model: ModelConfig, dtype: str) -> Parameters:
    tree = {
        group: {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=model.plan.sharding(spec.axes))
            for name, spec in specs.items()
        }
        for group, specs in parameter_tree(model, dtype=dtype).items()
    }
    return cast(Parameters, tree)


def _maps(model: ModelConfig) -> PlacementArrays | None:
    """Maps as they are after the first migration; none where a step is compiled without."""
    if model.experts.num_redundant == 0:
        return None
    replicated = model.plan.replicated()
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated),
        placement_arrays(first_placement(model)),
    )


def _capacity_factor(model: ModelConfig) -> jax.Array | None:
    if not model.experts.limits_capacity:
        return None
    return cast(jax.Array, jax.ShapeDtypeStruct((), jnp.float32, sharding=model.plan.replicated()))


def _pages(model: ModelConfig, setting: ServedSetting) -> tuple[int, tuple[LayerPages, ...]]:
    """Pages of a layer of the first group, and those of all layers where there are more groups."""
    num_pages = setting.batch * pages_per_sequence(setting.context, setting.page_size) + 1
    windows = windows_of(model.spec, longest=setting.context)
    rows = SchedulerSettings(max_running_requests=setting.batch, max_step_tokens=setting.prefill_tokens)
    groups = page_groups(windows, num_pages, scheduler=rows, cache=CacheSettings(page_size=setting.page_size))
    return groups[0].num_pages, layer_pages_of(windows, groups)


def _state(step: StepConfig, setting: ServedSetting, *, num_pages: int) -> DeviceState:
    model = step.model
    allocate = partial(
        allocate_state,
        model,
        num_pages=num_pages,
        page_size=setting.page_size,
        dtype=setting.kv_dtype,
        num_rows=setting.batch,
        pages_per_row=pages_per_sequence(setting.context, setting.page_size),
        layer_pages=step.layer_pages,
    )
    mesh = model.plan.mesh
    return jax.tree.map(
        lambda leaf, part: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part)),
        jax.eval_shape(allocate),
        state_partitions(model),
    )


def _elements(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _hlo_dtype(dtype: str) -> str:
    """How the text of a program spells a dtype."""
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
    return short.get(dtype) or dtype.replace("float8_", "f8")
