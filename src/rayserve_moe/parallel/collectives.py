"""Exchanges between data ranks, for arrays that each of them has its own version of; only inside a sharded function.

With one data rank each returns its argument, and the program holds no trace of it.
"""

from __future__ import annotations

import jax

from rayserve_moe.parallel.sharding import DATA, TENSOR, VOCABULARY_AXES, ParallelPlan


def vocabulary_rank(plan: ParallelPlan) -> jax.Array:
    """Which part of the vocabulary lies on this device, of `plan.num_expert_ranks` parts."""
    return jax.lax.axis_index(VOCABULARY_AXES if plan.data_size > 1 else TENSOR)


def sum_to_data_ranks(partial_sum: jax.Array, plan: ParallelPlan, *, dim: int) -> jax.Array:
    """Add up what the data ranks computed of the same array, and leave each the part along `dim` that is its own."""
    if plan.data_size == 1:
        return partial_sum
    return jax.lax.psum_scatter(partial_sum, DATA, scatter_dimension=dim, tiled=True)


def trade_between_data_ranks(local: jax.Array, plan: ParallelPlan, *, split_dim: int, join_dim: int) -> jax.Array:
    """Send part i along `split_dim` to data rank i, and join what comes from all of them along `join_dim`."""
    if plan.data_size == 1:
        return local
    return jax.lax.all_to_all(local, DATA, split_axis=split_dim, concat_axis=join_dim, tiled=True)
