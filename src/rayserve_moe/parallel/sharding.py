"""The one table from logical axes to mesh axes, and what follows from it.

The mesh has two axes: `data` (attention batch) and `tensor` (heads). Expert slots and the vocabulary lie over both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"
Rows = TypeVar("Rows")

# Tensor first: the parts that the data ranks of one tensor rank hold are neighbours, and join without a transposition.
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
    """How one model lies on one mesh. It travels as an argument; there is no current mesh.

    With one rank on an axis, collectives over it return their argument and leave no trace in the program. The data
    ranks lie over `num_slices` in order, equally many on each: tensor groups are within one.
    """

    mesh: Mesh
    num_slices: int = 1

    @property
    def tensor_size(self) -> int:
        return self.mesh.shape[TENSOR]

    @property
    def data_size(self) -> int:
        """Data-parallel ranks: groups of devices that run sequences of their own."""
        return self.mesh.shape[DATA]

    @property
    def num_expert_ranks(self) -> int:
        """Devices that hold different expert slots: all there are, so it is also the number of vocabulary parts."""
        return self.mesh.shape[DATA] * self.mesh.shape[TENSOR]

    def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Partition of an array whose dimensions carry the logical `axes`."""
        return PartitionSpec(*(MESH_AXES_OF[axis] for axis in axes))

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.partition(axes))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def data_rank(self) -> jax.Array:
        """This device's place on the data axis; only inside a sharded function."""
        return jax.lax.axis_index(DATA)

    def tensor_rank(self) -> jax.Array:
        """This device's place on the tensor axis; only inside a sharded function."""
        return jax.lax.axis_index(TENSOR)

    def expert_rank(self) -> jax.Array:
        """This device's place among those that hold expert slots; only inside a sharded function."""
        return jax.lax.axis_index((DATA, TENSOR))

    def sum_over_tensor(self, partial_sum: jax.Array) -> jax.Array:
        """Add up what each device of the tensor axis computed of the same array."""
        return jax.lax.psum(partial_sum, TENSOR) if self.tensor_size > 1 else partial_sum

    def gather_data_ranks(self, local: jax.Array, *, dim: int) -> jax.Array:
        """Join what each data rank has of an array along `dim`, in the order of the ranks."""
        return jax.lax.all_gather(local, DATA, axis=dim, tiled=True) if self.data_size > 1 else local


def vocabulary_rank(plan: ParallelPlan) -> jax.Array:
    """Which part of the vocabulary lies on this device, of `plan.num_expert_ranks` parts."""
    return jax.lax.axis_index(VOCABULARY_AXES if plan.data_size > 1 else TENSOR)


def sum_to_data_ranks(partial_sum: jax.Array, plan: ParallelPlan, *, dim: int) -> jax.Array:
    """Add up what the data ranks computed of the same array, and leave each the part along `dim` that is its own."""
    if plan.data_size == 1:
        return partial_sum
    return jax.lax.psum_scatter(partial_sum, DATA, scatter_dimension=dim, tiled=True)


def gather_rows(rows: Rows, plan: ParallelPlan) -> Rows:
    """Join what each data rank has of rows, in the order of the ranks, by one exchange.

    `rows` is a tree of arrays of 32 bits or of bool, all of one shape.
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
    """Into how many parts the mesh cuts a logical axis."""
    names = MESH_AXES_OF[axis] or ()
    return math.prod(plan.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
