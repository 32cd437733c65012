"""Writing new keys and values into the page pool."""

# T tokens   G KV heads   h head width

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(kv_pages: jax.Array, keys_TGh: jax.Array, values_TGh: jax.Array, slots_T: jax.Array) -> jax.Array:
    """Put K and V of each token at its slot (page * page_size + offset); returns the updated pool.

    `kv_pages` is [pages, page, 2 * G, h]. Padding tokens point into page 0 of a layer, which no sequence owns. What an
    8-bit pool cannot hold becomes its largest number.
    """
    num_pages, page_size, num_kv, width = kv_pages.shape
    kv_T = jnp.stack([keys_TGh, values_TGh], axis=2).reshape(-1, num_kv, width)
    if kv_pages.dtype.itemsize == 1:
        # float8_e4m3fn has no infinity: a plain cast would turn what is too large into NaN.
        largest = float(jnp.finfo(kv_pages.dtype).max)
        kv_T = jnp.clip(kv_T, -largest, largest)
    if len(slots_T) == 1:
        # XLA:CPU turns the write of a single row into a copy of the whole pool; of two rows, it does not.
        slots_T, kv_T = jnp.repeat(slots_T, 2), jnp.repeat(kv_T, 2, axis=0)
    flat = kv_pages.reshape(num_pages * page_size, num_kv, width)
    return flat.at[slots_T].set(kv_T.astype(kv_pages.dtype), mode="promise_in_bounds").reshape(kv_pages.shape)
