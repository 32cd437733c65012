"""Causal convolution over a few tokens ahead of a recurrence (`gated_delta`), by XLA."""

# T tokens   B single tokens and blocks   J taps   n taps but one   K key heads   W channels of a key head

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.gated_delta import WINDOW_ROWS, DeltaPools, RowEntries


class History(NamedTuple):
    """Locations of the tokens before each token that the convolution reads, [T, taps - 1]; the nearest is the last.

    A token that is not in the step is one of the last taps - 1 ahead of a single token or of a block, [B, taps - 1].
    """

    token_Tn: jax.Array
    """Index of the token in the step."""
    is_in_step_Tn: jax.Array
    part_T: jax.Array
    """Index of each token's single token or block."""
    ahead_Tn: jax.Array
    """Index of the token ahead of the single token or block, if it is not in the step."""
    position_Bn: jax.Array
    """Positions of the tokens ahead; zeros stand for negative ones."""
    rows_B: jax.Array
    entries: RowEntries


def find_history(
    positions_T: jax.Array,
    rows_B: jax.Array,
    entries: RowEntries,
    *,
    num_singles: int,
    block_tokens: int,
    num_taps: int,
) -> History:
    """Find the tokens that the convolution reads before each token; arguments as for `cut_pieces`."""
    singles, blocks = jnp.arange(num_singles), jnp.arange(num_singles, len(rows_B))
    part_T = jnp.concatenate([singles, jnp.repeat(blocks, block_tokens)])
    first_B = jnp.concatenate([singles, num_singles + block_tokens * jnp.arange(len(blocks))])
    rows_T, back_n = rows_B[part_T], jnp.arange(num_taps - 1, 0, -1)
    position_Tn = positions_T[:, None] - back_n
    token_Tn = jnp.maximum(jnp.arange(len(positions_T))[:, None] - back_n, 0)
    is_in_step_Tn = (rows_T[token_Tn] == rows_T[:, None]) & (positions_T[token_Tn] == position_Tn) & (position_Tn >= 0)
    # Tokens of a part are adjacent: an earlier token that is not in the step is ahead of the part.
    offset_T1 = (jnp.arange(len(positions_T)) - first_B[part_T])[:, None]
    ahead_Tn = jnp.minimum(jnp.arange(num_taps - 1) + offset_T1, num_taps - 2)
    return History(token_Tn, is_in_step_Tn, part_T, ahead_Tn, positions_T[first_B][:, None] - back_n, rows_B, entries)


def short_conv(
    inputs_TKW: jax.Array,
    taps_JKW: jax.Array,
    pools: DeltaPools,
    history: History,
    *,
    layer: tuple[jax.Array, ...],
    bias_KW: jax.Array | None = None,
) -> jax.Array:
    """Return the causal convolution of each channel and its SiLU, float32 [T, K, W]; the newest token has the last tap.

    `layer` are the first entry and the first row of the layer in the pools. `bias_KW` is added ahead of SiLU.
    """
    first_entry, first_row = layer
    (position_Bn, entries), rows_B = (history.position_Bn, history.entries), history.rows_B
    ring = pools.inputs_RJKW.at[first_row + rows_B[:, None], position_Bn % WINDOW_ROWS].get(mode="clip")
    behind_base = position_Bn - entries.source_base[:, None]
    place = jnp.clip(behind_base + len(taps_JKW) - 1, 0, len(taps_JKW) - 2)
    entry = pools.window_EJKW[first_entry + entries.source[:, None], place]
    # The window of the entry has the tokens ahead of it; zeros stand ahead of the first token.
    kept = jnp.where((behind_base >= 0)[..., None, None], ring, entry)
    kept = jnp.where((position_Bn >= 0)[..., None, None], kept, 0.0)
    kept, in_step = kept[history.part_T[:, None], history.ahead_Tn], inputs_TKW[history.token_Tn].astype(jnp.float32)
    before = jnp.where(history.is_in_step_Tn[..., None, None], in_step, kept)
    taps_JKW = taps_JKW.astype(jnp.float32)
    # One tap after the other: the order of the sum does not depend on the number of tokens.
    total_TKW = inputs_TKW.astype(jnp.float32) * taps_JKW[-1]
    for tap in range(len(taps_JKW) - 1):
        total_TKW = total_TKW + before[:, tap] * taps_JKW[tap]
    if bias_KW is not None:
        total_TKW = total_TKW + bias_KW.astype(jnp.float32)
    return jax.nn.silu(total_TKW)
