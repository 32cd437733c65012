"""The table from logical axes to mesh axes, and the sharding derived from it.

The mesh has two axes: `data` (attention batch) and `tensor` (heads). Expert slots and the vocabulary use both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"
Rows = TypeVar("Rows")

# Tensor first: the parts of a tensor rank's data ranks are neighbours, and join without a transposition.
VOCABULARY_AXES = (TENSOR, DATA)

MESH_AXES_OF: dict[str | None, str | tuple[str, ...] | None] = {
    None: None,
    "data_ranks": DATA,
    "layers": None,
    "model": None,
    "table_row": None,
    "head_dim": None,
    "expert_inner": None,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "dense_inner": TENSOR,
    "vocabulary": VOCABULARY_AXES,
    "expert_slots": (DATA, TENSOR),
}


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of a model on a mesh. It is passed as an argument; a current mesh does not exist.

    With a single rank on an axis, collectives over it return their argument and add nothing to the program.
    """

    mesh: Mesh
    num_slices: int = 1
    """The data ranks are divided over the slices in order, equally many on each; tensor groups stay within a slice."""
    adds_in_order: bool = False
    """Add the partial sums of devices in the order of their ranks. A collective's order depends on the array's size."""

    @property
    def tensor_size(self) -> int:
        return self.mesh.shape[TENSOR]

    @property
    def data_size(self) -> int:
        """Return the number of data-parallel ranks: groups of devices with their own sequences."""
        return self.mesh.shape[DATA]

    @property
    def num_expert_ranks(self) -> int:
        """Return the number of devices, each with its own expert slots; also the number of vocabulary parts."""
        return self.mesh.shape[DATA] * self.mesh.shape[TENSOR]

    def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return the partition of an array whose dimensions have the logical `axes`."""
        return PartitionSpec(*(MESH_AXES_OF[axis] for axis in axes))

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.partition(axes))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def data_rank(self) -> jax.Array:
        """Return this device's index on the data axis; only inside a sharded function."""
        return jax.lax.axis_index(DATA)

    def tensor_rank(self) -> jax.Array:
        """Return this device's index on the tensor axis; only inside a sharded function."""
        return jax.lax.axis_index(TENSOR)

    def expert_rank(self) -> jax.Array:
        """Return this device's index among the expert ranks; only inside a sharded function."""
        return jax.lax.axis_index((DATA, TENSOR))

    def sum_over_tensor(self, partial_sum: jax.Array) -> jax.Array:
        """Add up the partial sums of the tensor axis's devices."""
        if self.tensor_size == 1:
            return partial_sum
        if self.adds_in_order:
            return reduce(jnp.add, jax.lax.all_gather(partial_sum, TENSOR))
        return jax.lax.psum(partial_sum, TENSOR)

    def stack_tensor_ranks(self, local: jax.Array, *, dim: int) -> jax.Array:
        """Stack the tensor ranks' arrays along a new dimension `dim`, in rank order."""
        return jax.lax.all_gather(local, TENSOR, axis=dim)

    def gather_data_ranks(self, local: jax.Array, *, dim: int) -> jax.Array:
        """Concatenate the data ranks' parts of an array along `dim`, in rank order."""
        return jax.lax.all_gather(local, DATA, axis=dim, tiled=True) if self.data_size > 1 else local


def vocabulary_rank(plan: ParallelPlan) -> jax.Array:
    """Return the index of this device's part of the vocabulary, below `plan.num_expert_ranks`."""
    return jax.lax.axis_index(VOCABULARY_AXES if plan.data_size > 1 else TENSOR)


def sum_to_data_ranks(partial_sum: jax.Array, plan: ParallelPlan, *, dim: int) -> jax.Array:
    """Add up the data ranks' partial sums; return each rank its own part along `dim`."""
    if plan.data_size == 1:
        return partial_sum
    return jax.lax.psum_scatter(partial_sum, DATA, scatter_dimension=dim, tiled=True)


def gather_rows(rows: Rows, plan: ParallelPlan) -> Rows:
    """Concatenate the data ranks' rows in rank order by a single exchange.

    `rows` is a tree of arrays of 32 bits or of bool, all of the same shape.
    """
    if plan.data_size == 1:
        return rows
    arrays, tree = jax.tree.flatten(rows)
    wide = [array.astype(jnp.int32) if array.dtype == jnp.bool else array for array in arrays]
    bits = jnp.stack([jax.lax.bitcast_convert_type(array, jnp.int32) for array in wide])
    of_all = [
        jax.lax.bitcast_convert_type(array, like.dtype).astype(given.dtype)
        for array, like, given in zip(plan.gather_data_ranks(bits, dim=1), wide, arrays, strict=True)
    ]
    return jax.tree.unflatten(tree, of_all)


def num_parts(plan: ParallelPlan, axis: str) -> int:
    """Return the number of parts into which the mesh cuts a logical axis."""
    names = MESH_AXES_OF[axis] or ()
    return math.prod(plan.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
