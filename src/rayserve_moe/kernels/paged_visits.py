"""What positions alone say of the paged attention kernel: which keys each tile of queries sees."""

# B query blocks   Q queries per block   W visits: tiles of queries, block after block

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_reference import ScoreConfig


class Visits(NamedTuple):
    """What positions say of each visit, int32: it sees keys from `first_W` to ahead of `end_W`, none of padding alone.

    `filled_X` [W + 1] is the first visit that sees any, from each on; W: none.
    """

    first_W: jax.Array
    end_W: jax.Array
    filled_X: jax.Array


def visits_of(positions_BQ: jax.Array, config: ScoreConfig, *, tile_queries: int) -> Visits:
    """Visits of `tile_queries` queries each."""
    positions_Wq = positions_BQ.reshape(-1, tile_queries)
    is_real_Wq = positions_Wq >= 0
    first_Wq = config.first_key(positions_Wq)
    first_W = jnp.min(jnp.where(is_real_Wq, 0 if first_Wq is None else first_Wq, np.iinfo(np.int32).max), axis=1)
    end_W = jnp.max(positions_Wq, axis=1) + 1
    first_W = jnp.where(end_W > 0, first_W, 0)
    places_W = jnp.where(end_W > 0, np.arange(len(positions_Wq), dtype=np.int32), len(positions_Wq))
    filled_X = jax.lax.cummin(jnp.append(places_W, len(positions_Wq)), reverse=True)
    return Visits(first_W, end_W, filled_X)
