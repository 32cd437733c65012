"""Rows of the paged pool packed into the lanes of a TPU: [N, page, X], with a head as a slice of whole registers.

Heads narrower than a register share one: a set of P heads is `K .. K | V .. V`, two slices of 128 lanes, and the sets
follow each other. So the product of a slice serves P heads, with queries that are zero beside their own head, and no
lane of the pool is padding. Other heads are a set each, keys and values padded with zeros to whole registers, and so is
a latent.

    two heads of 64     | K0 K1 | V0 V1 | K2 K3 | V2 V3 | ..
    heads of 128        | K0 | V0 | K1 | V1 | ..
    keys of 192, V 128  | K0, 0 | V0 | K1, 0 | V1 | ..
    a latent of 512+64  | latent            | rotated, 0 |
"""

# T tokens   B blocks   Q queries per block   H query heads   G KV heads   h head width   v value width
# C sets   P KV heads of a set   R query heads of a set   K lanes of keys   V lanes of values   X lanes of a row

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128


@dataclass(frozen=True)
class RowLayout:
    """The layout of keys and values in a row."""

    num_sets: int
    """Sets of heads in a row."""
    set_heads: int
    """Heads of a set."""
    head_dim: int
    """Elements of a key."""
    value_dim: int
    """Elements of a value."""
    key_lanes: int
    """Lanes of a set's keys."""
    value_lanes: int
    """Lanes of a set's values."""
    values_at: int
    """First lane of a set's values; values of a latent are part of its key."""
    set_lanes: int
    """Lanes of a set."""

    def lanes_of(self, i: int) -> tuple[slice, slice]:
        """Return the lanes of the keys and of the values of set i."""
        keys, values = i * self.set_lanes, i * self.set_lanes + self.values_at
        return slice(keys, keys + self.key_lanes), slice(values, values + self.value_lanes)


def heads_of_a_set(head_dim: int, value_dim: int) -> int:
    """Return the number of heads that share a register; 1 if they do not divide it, or values are of another size."""
    return LANES // head_dim if LANES % head_dim == 0 and value_dim == head_dim else 1


def packed_width(num_kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Return the lanes of a row of K and V; heads are repeated until they fill sets (`repeats_of`)."""
    shared = heads_of_a_set(head_dim, value_dim)
    return num_kv_heads * repeats_of(num_kv_heads, shared) // shared * set_lanes(head_dim, value_dim)


def set_lanes(head_dim: int, value_dim: int) -> int:
    """Return the lanes of the keys and values of a set."""
    shared = heads_of_a_set(head_dim, value_dim)
    return _whole(shared * head_dim) + _whole(shared * value_dim)


def latent_lanes(width: int) -> int:
    """Return the lanes of a row of a latent with its rotated key, `width` elements together."""
    return _whole(width)


def repeats_of(num_kv_heads: int, shared: int) -> int:
    """Return how often a row holds every KV head: more than once if those of a device do not fill sets of `shared`."""
    repeats = 1
    while num_kv_heads * repeats % shared:
        repeats *= 2
    return repeats


def layout_of(row_lanes: int, head_dim: int, *, latent_width: int = 0, value_width: int = 0) -> RowLayout:
    """Return the layout of rows of `row_lanes` for queries of `head_dim`; ValueError if they do not match.

    Values are part of a latent if `latent_width` is not 0, else have `value_width` elements, or `head_dim` if it is 0.
    """
    if latent_width:
        if row_lanes != latent_lanes(head_dim) or latent_width % LANES:
            raise ValueError(f"latents of {latent_width} of {head_dim} elements do not lie in rows of {row_lanes}")
        return RowLayout(1, 1, head_dim, latent_width, row_lanes, latent_width, 0, row_lanes)
    value_dim = value_width or head_dim
    shared, lanes = heads_of_a_set(head_dim, value_dim), set_lanes(head_dim, value_dim)
    if row_lanes % lanes:
        raise ValueError(f"heads of {head_dim} with values of {value_dim} do not lie in rows of {row_lanes}")
    keys, values = _whole(shared * head_dim), _whole(shared * value_dim)
    return RowLayout(row_lanes // lanes, shared, head_dim, value_dim, keys, values, keys, lanes)


def packed_kv(keys_TGh: jax.Array, values_TGv: jax.Array) -> jax.Array:
    """Return keys and values of each token as a row [T, X]."""
    num_tokens, num_heads, _ = keys_TGh.shape
    shared = heads_of_a_set(keys_TGh.shape[2], values_TGv.shape[2])
    sets = []
    for heads in (keys_TGh, values_TGv):
        repeated = jnp.repeat(heads, repeats_of(num_heads, shared), axis=1)
        width = shared * heads.shape[2]
        sets.append(_padded(repeated.reshape(num_tokens, -1, width), _whole(width)))
    return jnp.concatenate(sets, axis=2).reshape(num_tokens, -1)


def packed_latents(latents_T1h: jax.Array) -> jax.Array:
    """Return latents with their rotated keys as rows [T, X]."""
    return _padded(latents_T1h[:, 0], latent_lanes(latents_T1h.shape[-1]))


def spread_queries(queries_BQHh: jax.Array, layout: RowLayout) -> jax.Array:
    """Return queries against the keys of sets, zero in lanes of other heads of the set: [B, C, Q, R, K].

    Raises: ValueError if fewer query heads than KV heads fill the sets.
    """
    num_blocks, num_queries, num_heads, width = queries_BQHh.shape
    if num_heads % (layout.num_sets * layout.set_heads):
        raise ValueError(f"{num_heads} query heads of {width} do not divide by the KV heads that fill registers")
    own_PH1 = _own_heads(num_heads, layout)
    spread_BQHK = jnp.concatenate([jnp.where(own_H1, queries_BQHh, 0) for own_H1 in own_PH1], axis=-1)
    rows = _padded(spread_BQHK, layout.key_lanes).reshape(
        num_blocks, num_queries, layout.num_sets, -1, layout.key_lanes
    )
    return rows.transpose(0, 2, 1, 3, 4)


def gather_heads(attended_BCQRV: jax.Array, layout: RowLayout, *, width: int) -> jax.Array:
    """Return the attended values of each head's own lanes: [B, Q, H, width]."""
    num_blocks, _, num_queries, _, lanes = attended_BCQRV.shape
    rows_BQHV = attended_BCQRV.transpose(0, 2, 1, 3, 4).reshape(num_blocks, num_queries, -1, lanes)
    attended = rows_BQHV[..., :width]
    for i, own_H1 in enumerate(_own_heads(rows_BQHV.shape[2], layout)[1:], start=1):
        attended = jnp.where(own_H1, rows_BQHV[..., i * width : (i + 1) * width], attended)
    return attended


def _own_heads(num_heads: int, layout: RowLayout) -> np.ndarray:
    """Return True for query heads that belong to a KV head of their set, bool [P, H, 1]."""
    of_set = np.arange(num_heads) // (num_heads // (layout.num_sets * layout.set_heads)) % layout.set_heads
    return (of_set == np.arange(layout.set_heads)[:, None])[..., None]


def _whole(width: int) -> int:
    return -(-width // LANES) * LANES


def _padded(rows: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, lanes - rows.shape[-1]),))
