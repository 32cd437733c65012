"""Rows in blocks of a fixed size, so that the result of a row does not depend on how many others a step has.

XLA chooses the order of a sum by the number of rows. The body of a loop over blocks of a fixed number of rows is the
same program for any number of blocks, so every row is added up in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ByRows = Callable[[Callable[[Any], Any], Any], Any]
"""Applies a function to a tree of arrays [T, ...]. The function returns such a tree and treats rows independently."""

ROWS_PER_BLOCK = 32


def at_once(function: Callable[[Any], Any], rows: Any) -> Any:
    """Apply a function to all rows together."""
    return function(rows)


def in_blocks(function: Callable[[Any], Any], rows: Any, *, size: int = ROWS_PER_BLOCK) -> Any:
    """Apply a function to rows in blocks of `size`; zeros fill the last block.

    XLA inlines a loop with a single turn. The barriers then prevent fusions of its body with the code around it.
    """
    num_rows = len(jax.tree.leaves(rows)[0])
    num_blocks = -(-num_rows // size)

    def cut(array: jax.Array) -> jax.Array:
        padding = ((0, num_blocks * size - num_rows), *((0, 0),) * (array.ndim - 1))
        return jnp.pad(array, padding).reshape(num_blocks, size, *array.shape[1:])

    def compute(block: Any) -> Any:
        return jax.lax.optimization_barrier(function(jax.lax.optimization_barrier(block)))

    made = jax.lax.map(compute, jax.tree.map(cut, rows))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:num_rows], made)
