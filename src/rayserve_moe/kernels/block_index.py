"""Index of block-sparse attention of a layer over paged keys: from normed tokens to the blocks that each token sees."""

# T tokens   D model width   L layers   A index heads   d width of a head   i heads * d   K chosen blocks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.kernels.kv_pool import write_rows
from rayserve_moe.kernels.reference.block_index import BlockChoice
from rayserve_moe.kernels.reference.layers import Rotation, project, rms_norm, rotate
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.kernels.token_index import choose_in_parts
from rayserve_moe.parallel.sharding import ParallelPlan

BLOCK_INDEX = ("index_q_LDi", "index_k_LDd", "index_q_norm_Ld", "index_k_norm_Ld")
"""Parameters of an index of blocks."""


@dataclass(frozen=True)
class BlockIndexConfig:
    """Constants of an index of blocks, the same in all layers."""

    num_heads: int
    """Heads of queries."""
    choice: BlockChoice
    """The blocks that are chosen by scores."""
    eps: float
    """Epsilon of the norms of queries and keys."""
    interleaved_rotation: bool = False
    """See `layers.rotate`."""
    plan: ParallelPlan | None = None
    """Devices that share the choice; None: this device chooses for all tokens."""


def choose_layer_blocks(  # noqa: PLR0913 (kernels, by keyword)
    normed_TD: jax.Array,
    key_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: BlockIndexConfig,
    choose: Callable[..., jax.Array],
    rows_of: Callable[[jax.Array], jax.Array] = jnp.asarray,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, jax.Array]:
    """Return the blocks that each token sees, int32 [T, A, K], and the pool with the keys of the new tokens.

    Queries and keys are normed by head, and rotate as those of attention. `choose` has the signature of
    `reference.block_index.choose_blocks`. `key_pages` is [L * pages, page, 1, d], or has the rows of `rows_of`.
    """
    weights, batch, rotation, layer, *_ = inputs
    batch, first_page, _ = batch.of_layer(layer, key_pages, len(weights["index_k_LDd"]))
    of_layer = {name: weights[name][layer] for name in BLOCK_INDEX}

    def heads(rows: tuple[jax.Array, Rotation]) -> tuple[jax.Array, jax.Array]:
        part_TD, rotation = rows

        def project_heads(matrix: str, norm: str) -> jax.Array:
            projected_TAd = project(part_TD, of_layer[matrix]).reshape(len(part_TD), -1, len(of_layer[norm]))
            projected_TAd = rms_norm(projected_TAd, of_layer[norm], config.eps)
            return rotate(projected_TAd, rotation, interleaved=config.interleaved_rotation)

        return project_heads("index_k_LDd", "index_k_norm_Ld"), project_heads("index_q_LDi", "index_q_norm_Ld")

    with jax.named_scope("index_projections"):
        keys_T1d, queries_TAd = by_rows(heads, (normed_TD, rotation))
    with jax.named_scope("index_update"):
        slots_T = batch.kv_slots_T + first_page * key_pages.shape[1]
        key_pages = write_rows(key_pages, rows_of(keys_T1d), slots_T)
    with jax.named_scope("index_scores"):
        choose = partial(choose, choice=config.choice)
        places = (batch, first_page)
        chosen_TAK = choose_in_parts((queries_TAd,), key_pages, *places, choose=choose, plan=config.plan)
    return chosen_TAK, key_pages
