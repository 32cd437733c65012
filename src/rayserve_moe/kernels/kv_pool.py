"""The layout of keys and values in the paged pool, and writes to it.

XLA:CPU computes a scatter of a float narrower than 32 bits in float32: it converts the whole pool, twice, at every
layer. So the pool of such a platform holds the bits of bfloat16 as uint16, and of float8_e4m3fn as uint8. Only
copies of rows that are read are converted.
"""

# T tokens   G local KV heads   h head width   v value width

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""The dtypes of pools that hold other dtypes as their bits."""
PAIRED = "int16"
"""The dtype of pools that hold two numbers of float8_e4m3fn in an element (`tpu.byte_pairs`)."""
_HELD_AS = {jnp.dtype(bits): jnp.dtype(held) for held, bits in BITS.items()}


class LayerPages(NamedTuple):
    """The pages of a layer: the number of its page table, its first page in the pool, and its number of pages."""

    table: int
    first_page: int
    num_pages: int


class StatePages(NamedTuple):
    """The pages of the layers that keep a state, in the pool of that state."""

    state: str
    layers: tuple[LayerPages, ...]


def num_tables(layer_pages: Iterable[StatePages]) -> int:
    """Return the number of page tables of a sequence; 1 if `layer_pages` is empty."""
    return 1 + max((pages.table for of_state in layer_pages for pages in of_state.layers), default=0)


def write_rows(pool: jax.Array, rows: jax.Array, slots_T: jax.Array) -> jax.Array:
    """Put rows [T, ...] at slots (page * page_size + offset) of a pool [pages, page, ...]; return the updated pool.

    Padding tokens point into page 0 of a layer, which no sequence owns. Numbers beyond the range of an
    8-bit pool become its largest number.
    """
    held = _HELD_AS.get(pool.dtype, pool.dtype)
    if held.itemsize == 1:
        rows = clipped(rows, held)
    if len(slots_T) == 1:
        # XLA:CPU turns the write of a single row into a copy of the whole pool; of two rows, it does not.
        slots_T, rows = jnp.repeat(slots_T, 2), jnp.repeat(rows, 2, axis=0)
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[slots_T].set(_stored(rows, pool.dtype), mode="promise_in_bounds").reshape(pool.shape)


def clipped(rows: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return rows within the range of a dtype: float8_e4m3fn has no infinity, and a plain cast would give NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(rows, -largest, largest)


def held_shape(shape: tuple[int, ...], dtype: str, *, held: str) -> tuple[int, ...]:
    """Return the shape of a row of `dtype` in a pool of dtype `held`, which may hold several numbers in an element."""
    per_element = jnp.dtype(held).itemsize // jnp.dtype(dtype).itemsize
    return (*shape[:-1], shape[-1] // per_element)


def copy_pages(pool: jax.Array, sources_N: jax.Array, targets_N: jax.Array, count: jax.Array) -> jax.Array:
    """Copy the first `count` of pages `sources` of a pool to `targets`, int32 [N]; returns the updated pool.

    Page by page: XLA would gather all of them into a buffer first.
    """

    def copy_one(number: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(pool, sources_N[number], 1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, targets_N[number], axis=0)

    return jax.lax.fori_loop(0, count, copy_one, pool)


def put_pages(pool: jax.Array, pages_N: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Put pages [N, ...] at `targets` of a pool, int32 [N]; return the updated pool. Targets beyond it are dropped."""
    return pool.at[targets_N].set(pages_N, mode="drop")


def write_kv(kv_pages: jax.Array, keys_TGh: jax.Array, values_TGv: jax.Array, slots_T: jax.Array) -> jax.Array:
    """Write the K and V of each token by `write_rows`; `kv_pages` is [pages, page, G, h + v]."""
    return write_rows(kv_pages, kv_rows(keys_TGh, values_TGv), slots_T)


def kv_rows(keys_TGh: jax.Array, values_TGv: jax.Array) -> jax.Array:
    """Return K and V of each token as a row of the pool, the value of a head behind its key: [T, G, h + v]."""
    return jnp.concatenate([keys_TGh, values_TGv], axis=2)


def read_wide(stored: jax.Array) -> jax.Array:
    """Return elements read from a pool as float32."""
    if stored.dtype in _HELD_AS:
        stored = jax.lax.bitcast_convert_type(stored, _HELD_AS[stored.dtype])
    return stored.astype(jnp.float32)


def _stored(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype not in _HELD_AS:
        return rows.astype(dtype)
    return jax.lax.bitcast_convert_type(rows.astype(_HELD_AS[dtype]), dtype)
