"""Embedding lookup and output head, with tables sharded by vocabulary over all devices.

Every data rank needs all shards of the tables, so tokens are sent to the tables: ids (or hidden states) of all data
ranks are gathered, and every device computes its vocab shard. Each data rank receives its rows; logits stay sharded,
and sampling works on the shards.
"""

# T tokens of a data rank   S sampled tokens of a data rank   D model width   V vocabulary (local share)
# W tokens of all data ranks   C chunks

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.layers import take_rows
from rayserve_moe.parallel.sharding import ParallelPlan, sum_to_data_ranks, vocabulary_rank
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

GATHERED_BYTES = 64 << 20
"""Maximum bytes of gathered rows per device; more tokens are looked up in chunks."""


TakeRows = Callable[[jax.Array, jax.Array], jax.Array]


def look_up(
    table_VD: jax.Array, token_ids_T: jax.Array, *, plan: ParallelPlan, take: TakeRows = take_rows
) -> jax.Array:
    """Return the rows [T, D] of this data rank's tokens, equal on every device of its tensor group.

    `take` reads rows of this device's share in its memory layout.
    """
    num_tokens, (_, width) = token_ids_T.shape[0], table_VD.shape

    def look_up_chunk(ids_T: jax.Array) -> jax.Array:
        rows_WD = _rows_of_my_part(table_VD, plan.gather_data_ranks(ids_T, dim=0), plan, take)
        return sum_to_data_ranks(rows_WD, plan, dim=0)

    chunk_size = max(1, GATHERED_BYTES // (plan.data_size * width * table_VD.dtype.itemsize))
    if plan.data_size == 1 or num_tokens <= chunk_size:
        return plan.sum_over_tensor(look_up_chunk(token_ids_T))
    ids_CT = jnp.pad(token_ids_T, (0, -num_tokens % chunk_size)).reshape(-1, chunk_size)
    rows_TD = jax.lax.map(look_up_chunk, ids_CT).reshape(-1, width)[:num_tokens]
    return plan.sum_over_tensor(rows_TD)


def local_logits(
    hidden_SD: jax.Array,
    score: Callable[[jax.Array], jax.Array],
    *,
    part: VocabularyPart,
    plan: ParallelPlan | None,
) -> jax.Array:
    """Return logits [W, V] of the samples of all data ranks for this device's vocab shard; padding is minus infinity.

    `score` returns the logits of hidden states [W, D] for this device's share of the head. With `plan` None, every
    device already has the hidden states of all ranks.
    """
    logits_WV = score(hidden_SD if plan is None else plan.gather_data_ranks(hidden_SD, dim=0))
    assert logits_WV.shape[1] == part.width or not part.axes, f"{logits_WV.shape[1]} words, not {part.width}"
    return part.without_padding(logits_WV[:, : part.width])


def _rows_of_my_part(table_VD: jax.Array, token_ids_W: jax.Array, plan: ParallelPlan, take: TakeRows) -> jax.Array:
    """Return the rows of tokens whose row is on this device, and zeros for other tokens."""
    local_W = token_ids_W - vocabulary_rank(plan) * table_VD.shape[0]
    here_W = (local_W >= 0) & (local_W < table_VD.shape[0])
    local_W = jnp.where(here_W, local_W, 0)
    return jnp.where(here_W[:, None], take(table_VD, local_W), 0)
