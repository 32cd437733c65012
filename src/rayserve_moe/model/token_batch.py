"""The tokens of one step as the model sees them: a flat run of tokens, cut into attention blocks."""

# T tokens   B attention blocks   P page-table width   U single-token blocks   Q tokens per prefill block

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

ARRAYS = ["token_ids_T", "positions_T", "kv_slots_T", "page_table_BP"]


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=["num_singles"])
@dataclass(frozen=True)
class TokenBatch:
    """A ragged batch laid out as `[U single tokens | prefill blocks of Q tokens]`.

    `token_ids_T`, `positions_T` (-1: padding) and `kv_slots_T` are int32 [T]; `page_table_BP` int32 holds the pages
    of the sequence that each block belongs to. `num_singles` is U.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    kv_slots_T: jax.Array
    page_table_BP: jax.Array
    num_singles: int

    @property
    def num_prefill_blocks(self) -> int:
        return self.page_table_BP.shape[0] - self.num_singles

    @property
    def valid_T(self) -> jax.Array:
        """Which tokens are not padding, bool [T]."""
        return self.positions_T >= 0
