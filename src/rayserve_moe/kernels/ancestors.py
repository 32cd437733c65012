"""Trees of drafts as bit masks: which nodes of its tree a token sees.

A tree has at most 32 nodes, parents ahead of children, and stands behind its sequence: the key of node j lies at the
place `root + j`. Bit j of a node's mask says that it sees node j; the bits are its ancestors' and, as the highest, its
own. So a node of d + 1 bits is at depth d, at position `root + d`, and the bits in rising order are the path to it: the
mask and the position of a token say where its tree begins, where its key lies, and where that of each of its positions
does. A token outside of trees has the mask 1; the nodes of a chain have masks of ones alone.
"""

# N nodes of the largest tree

from __future__ import annotations

import jax
import jax.numpy as jnp

MOST_NODES = 32


def depths_of(ancestors: jax.Array) -> jax.Array:
    """How far below the root nodes are, int32; of any shape, as all here."""
    return jax.lax.population_count(ancestors) - 1


def nodes_of(ancestors: jax.Array) -> jax.Array:
    """Which nodes of their trees these are, int32."""
    return MOST_NODES - 1 - jax.lax.clz(ancestors)


def parents_of(ancestors: jax.Array) -> jax.Array:
    """Which nodes they follow, int32; a root's is -1."""
    return nodes_of(ancestors ^ jnp.left_shift(jnp.int32(1), nodes_of(ancestors)))


def places_of(positions: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Where the keys of tokens lie, as if they stood there, int32."""
    return positions - depths_of(ancestors) + nodes_of(ancestors)


def paths_of(ancestors: jax.Array) -> jax.Array:
    """The nodes on the way to each, int32 [..., N]: at depth d that of its d-th bit, 0 beyond its own."""
    nodes_N = jnp.arange(MOST_NODES, dtype=jnp.int32)
    is_on_path = (ancestors[..., None] & jnp.left_shift(jnp.int32(1), nodes_N)) != 0
    depth = jnp.cumsum(is_on_path, axis=-1) - 1
    is_there = is_on_path[..., None, :] & (depth[..., None, :] == nodes_N[:, None])
    return jnp.sum(jnp.where(is_there, nodes_N, 0), axis=-1, dtype=jnp.int32)
