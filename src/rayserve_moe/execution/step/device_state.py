"""Arrays that stay on the devices between steps: the state, and idle block inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rayserve_moe.execution.step.function import BIAS_AXES, COUNT_AXES, ROW_AXES, WORD_AXES
from rayserve_moe.execution.step.pack import PackedBlocks, forced_choice_shapes, unforced
from rayserve_moe.execution.step.pytrees import BlockInputs, DeviceState, StepShape
from rayserve_moe.execution.step.row_updates import MAX_BIASES
from rayserve_moe.kernels.kv_pool import StatePages, num_tables
from rayserve_moe.model.layers.index_rows import index_layout
from rayserve_moe.model.model_config import NO_CAPTURES, Captures, ForcedChoices, ModelConfig
from rayserve_moe.model.states import PoolCounts, pool_shapes
from rayserve_moe.model.transformer import words_of
from rayserve_moe.scheduling.step_plan import NUM_FLOATS, NUM_INTEGERS


def allocate(shapes: DeviceState) -> DeviceState:
    """Return zeros of the shapes, on their devices."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shapes)


def state_shapes(  # noqa: PLR0913 (sizes, all by keyword)
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: str,
    num_rows: int,
    pages_per_row: int,
    layer_pages: tuple[StatePages, ...] = (),
    num_entries: int = 0,
    num_columns: int = 0,
) -> DeviceState:
    """Return the shapes of the state of all data ranks, with `num_rows` rows each.

    Every layer has `num_pages` pages, or those of `layer_pages`. `dtype` is the dtype of the KV cache. Layers
    with entries have `num_entries`. A row has `num_columns` state values after its page tables.
    """
    spec, plan = config.spec, config.plan
    ranks, words = plan.data_size, words_of(config)

    def array(shape: tuple[int, ...], dtype: DTypeLike, axes: tuple[str | None, ...]) -> jax.Array:
        of_all_ranks = jax.ShapeDtypeStruct((ranks * shape[0], *shape[1:]), dtype, sharding=plan.sharding(axes))
        return cast(jax.Array, of_all_ranks)

    return DeviceState(
        pools=pool_shapes(
            config,
            PoolCounts(num_pages, num_entries, num_rows),
            page_size=page_size,
            dtype=dtype,
            layer_pages=layer_pages,
        ),
        expert_counts_ME=array((len(spec.moe_layer_ids), spec.router.num_experts), jnp.int32, COUNT_AXES),
        page_table_RP=array((num_rows, pages_per_row * num_tables(layer_pages) + num_columns), jnp.int32, ROW_AXES),
        sampling_floats_RF=array((num_rows, NUM_FLOATS), jnp.float32, ROW_AXES),
        sampling_integers_RI=array((num_rows, NUM_INTEGERS), jnp.uint32, ROW_AXES),
        last_tokens_R=array((num_rows,), jnp.int32, ROW_AXES[:1]),
        seen_RV=array((num_rows, words.num_parts * words.width), jnp.int32, WORD_AXES),
        bias_ids_RB=array((num_rows, MAX_BIASES), jnp.int32, BIAS_AXES),
        bias_values_RB=array((num_rows, MAX_BIASES), jnp.float32, BIAS_AXES),
    )


class BlockInputSource:
    """Source of the block inputs of a shape; steps without forced routing need no transfer.

    A server that `captures` gates or choices of an index can force them. Sources share the arrays of `no_choices`.
    """

    def __init__(
        self,
        shape: StepShape,
        config: ModelConfig,
        *,
        captures: Captures,
        no_choices: Callable[[], ForcedChoices | None],
    ) -> None:
        self._shapes = block_input_shapes(shape, config, captures=captures)
        self._no_choices = no_choices

    @cached_property
    def nothing(self) -> BlockInputs:
        """Return inputs without forced routing.

        They come from the host: a program that fills an array would be compiled during a step.
        """
        ids, gates, choices = self._shapes
        return BlockInputs(
            _like(ids, np.full(ids.shape, -1, ids.dtype)),
            None if gates is None else _like(gates, np.full(gates.shape, np.nan, gates.dtype)),
            None if choices is None else self._no_choices(),
        )

    def inputs(self, packed: PackedBlocks | None) -> BlockInputs:
        """Return the inputs of a step."""
        if packed is None or packed.forced is None:
            return self.nothing
        inputs = self.nothing._replace(forced_NMXK=_like(self.nothing.forced_NMXK, packed.forced))
        if packed.gates is not None and inputs.gates_NMXK is not None:
            inputs = inputs._replace(gates_NMXK=_like(inputs.gates_NMXK, packed.gates))
        if packed.choices is None or inputs.choices is None:
            return inputs
        return inputs._replace(choices=ForcedChoices(*map(_like, inputs.choices, packed.choices)))


def block_input_shapes(shape: StepShape, config: ModelConfig, *, captures: Captures = NO_CAPTURES) -> BlockInputs:
    """Return shapes, dtypes and shardings of the block inputs of a shape, for all data ranks.

    They include gates and choices of an index if the server captures them.
    """
    plan, layout = config.plan, config.spec.routing_layout
    num_tokens, (num_layers, top_k) = shape.num_blocks * shape.block_tokens, layout.row_shape

    def array(sizes: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        of_ranks = jax.ShapeDtypeStruct((plan.data_size, *sizes), dtype, sharding=plan.sharding(("data_ranks",)))
        return cast(jax.Array, of_ranks)

    sizes = (num_layers, num_tokens, top_k)
    gates = array(sizes, jnp.float32) if captures.gates else None
    return BlockInputs(array(sizes, jnp.int16), gates, choice_shapes(config) if captures.index else None)


def choice_shapes(config: ModelConfig) -> ForcedChoices | None:
    """Return shapes, dtypes and shardings of forced choices, the same for every shape; None without an index."""
    plan, index = config.plan, index_layout(config.spec)
    if index is None:
        return None
    shapes = forced_choice_shapes(index, num_ranks=plan.data_size)
    sharding = plan.sharding(("data_ranks",))
    return ForcedChoices(*(cast(jax.Array, jax.ShapeDtypeStruct(s, jnp.int32, sharding=sharding)) for s in shapes))


def no_choices(config: ModelConfig) -> ForcedChoices | None:
    """Return arrays without a forced choice of an index; None for a model without an index."""
    if (shapes := choice_shapes(config)) is None:
        return None
    index = index_layout(config.spec)
    assert index is not None, "a model with choices has an index"
    return ForcedChoices(*map(_like, shapes, unforced(index, num_ranks=config.plan.data_size)))


def _like(array: jax.Array | jax.ShapeDtypeStruct, values: np.ndarray) -> jax.Array:
    """Return values that every host has as an array with the sharding of `array`."""
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: values[index])
