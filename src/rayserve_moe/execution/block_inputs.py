"""What a step with prefill blocks is asked for, on the devices: arrays that ask for nothing stay there."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.pack import PackedBlocks
from rayserve_moe.execution.step_types import BlockInputs, StepShape
from rayserve_moe.model.transformer import ModelConfig


class BlockInputSource:
    """Makes the block inputs of one shape; what is not asked for costs no transfer."""

    def __init__(self, shape: StepShape, config: ModelConfig) -> None:
        self._arrays = block_input_shapes(shape, config)

    @cached_property
    def nothing(self) -> BlockInputs:
        """Asks for nothing."""
        forced, targets = (jnp.full(a.shape, -1, a.dtype, device=a.sharding) for a in self._arrays)
        return BlockInputs(forced, targets)

    def inputs(self, packed: PackedBlocks | None) -> BlockInputs:
        """The inputs of a step."""
        if packed is None:
            return self.nothing
        asked = (packed.forced, packed.targets)
        pairs = zip(asked, self.nothing, strict=True)
        forced, targets = (nothing if values is None else _like(nothing, values) for values, nothing in pairs)
        return BlockInputs(forced, targets)


def block_input_shapes(shape: StepShape, config: ModelConfig) -> BlockInputs:
    """Shapes, dtypes and shardings of the block inputs of a shape, for all data ranks."""
    plan, layout = config.plan, config.spec.routing_layout
    num_tokens, (num_layers, top_k) = shape.num_blocks * shape.block_tokens, layout.row_shape
    forced = (plan.data_size, num_layers, num_tokens, top_k)
    shapes = (
        jax.ShapeDtypeStruct(forced, jnp.int16, sharding=plan.sharding(("data_ranks",))),
        jax.ShapeDtypeStruct((plan.data_size, num_tokens), jnp.int32, sharding=plan.replicated()),
    )
    return BlockInputs(*cast(tuple[jax.Array, jax.Array], shapes))


def _like(array: jax.Array, values: np.ndarray) -> jax.Array:
    """The values that every host has, spread over the devices as `array` is."""
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: values[index])
