"""The recurrence of gated delta layers in one TPU kernel (`reference.gated_delta.advance`).

A visit is the tokens of one row. Its state and its ring, up to the cursor, are copied into the core's memory while the
visits before it are computed, and only new rows of the ring go back. A token at a multiple of 64 folds the chunk before
it: it writes a state, which no other token does.

Tokens are computed one after the other by the same operations, be they decoded, drafted or of a prompt, so that outputs
and states do not depend on how they came. They differ from those of the reference by rounding.
"""

# T tokens   V visits   H value heads   v value width   P pieces   N tokens of a piece

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE, DeltaPools, DeltaTokens, Pieces, RowEntries
from rayserve_moe.kernels.tpu.delta_call import NUM_BUFFERS, TokenScalars, VisitShape, scratch_of
from rayserve_moe.kernels.tpu.delta_products import ROWS
from rayserve_moe.kernels.tpu.delta_visits import compute_token
from rayserve_moe.kernels.tpu.packed_rows import LANES
from rayserve_moe.kernels.tpu.paged_attention import cores_of_device
from rayserve_moe.kernels.tpu.paged_sizes import VMEM_BYTES

MAX_TOKENS = 8192
"""Maximum number of tokens whose scalars a core's scalar memory holds."""
MAX_HELD_BYTES = VMEM_BYTES * 3 // 4
"""Maximum bytes of states and rings in the core's memory."""
NUM_POOLS = len(DeltaPools._fields)


def unsupported_reason(
    tokens: DeltaTokens, pools: DeltaPools, pieces: Pieces, *, layer: tuple[jax.Array, ...], delta: bool = True
) -> str:
    """Return why `advance_tokens` does not take a call; empty if it does."""
    del pieces, layer
    (num_tokens, num_heads, width), key_heads = tokens.values_THv.shape, tokens.keys_TKd.shape[1]
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens, not {MAX_TOKENS} or fewer"
    if not delta or tokens.decay_THx.shape[2] != 1:
        return "the rule is not a delta rule with a decay per head"
    if (tokens.keys_TKd.shape[2], width) != (LANES, LANES):
        return f"keys of width {tokens.keys_TKd.shape[2]} and values of width {width}, not {LANES}"
    if pools.decay_RCHx.shape[1:] != (num_heads, LANES):
        return "rings of decays have other places"
    if num_heads > LANES or num_heads % ROWS or key_heads % ROWS:
        return f"{num_heads} heads and {key_heads} key heads, not multiples of {ROWS} up to {LANES}"
    ring = CHUNK * (num_heads + key_heads)
    held = 4 * LANES * (NUM_BUFFERS * (num_heads * LANES + ring) + ring)
    if held > MAX_HELD_BYTES:
        return f"states and rings of {num_heads} heads take {held >> 20} of {MAX_HELD_BYTES >> 20} MiB"
    return ""


def advance_tokens(
    tokens: DeltaTokens,
    pools: DeltaPools,
    pieces: Pieces,
    *,
    layer: tuple[jax.Array, ...],
    delta: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, DeltaPools]:
    """Compute `advance`; the tokens of a row are adjacent and in order.

    `interpret` (see `pallas_call`) runs it without a TPU.
    """
    assert delta, "an unsupported rule"
    num_tokens, num_heads, _ = tokens.values_THv.shape
    wide = [part.astype(jnp.float32) for part in tokens]
    is_sound_T = jnp.stack([jnp.all(jnp.isfinite(part), axis=tuple(range(1, part.ndim))) for part in wide]).all(axis=0)
    queries, keys, values, decays, betas = (
        jnp.where(is_sound_T.reshape(-1, *[1] * (part.ndim - 1)), part, 0.0) for part in wide[:-1]
    )
    gates_TGH = jnp.stack([decays[..., 0], betas], axis=1)
    num_cores = cores_of_device(interpret)
    dtype = jnp.bfloat16 if tokens.keys_TKd.dtype == jnp.bfloat16 else jnp.float32
    shape = VisitShape(num_heads, keys.shape[1], num_tokens, num_cores, dtype, pools.window_EJKW.shape[1])
    scalars = token_scalars(pieces, layer, num_tokens=num_tokens, num_cores=num_cores)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    given = [queries, keys, values, gates_TGH, wide[-1]]
    flat = pools._replace(
        keys_RCKd=pools.keys_RCKd.reshape(len(pools.keys_RCKd), -1, LANES),
        fresh_RCHv=pools.fresh_RCHv.reshape(len(pools.fresh_RCHv), -1, LANES),
    )
    held = [*flat]
    if not interpret:
        # XLA may otherwise bring a pool that fits into the core's memory there, and back.
        held = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in held]
    num_ahead = len(scalars) + len(given)
    out_THv, *held = pl.pallas_call(
        partial(compute_token, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_tokens),
            in_specs=[*(_of_token(part) for part in given[:-1]), hbm, *[hbm] * NUM_POOLS],
            out_specs=[hbm, *[hbm] * NUM_POOLS],
            scratch_shapes=[buffer for group in scratch_of(shape) for buffer in group],
        ),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (values, *held)],
        input_output_aliases={num_ahead + pool: 1 + pool for pool in range(NUM_POOLS)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="delta_rule",
        interpret=interpret,
    )(*scalars, *given, *held)
    found_T11 = (scalars.visit_T >= 0)[:, None, None]
    out_THv = jnp.where(found_T11, jnp.where(is_sound_T[:, None, None], out_THv, jnp.nan), 0.0)
    return out_THv, DeltaPools(*(part.reshape(pool.shape) for part, pool in zip(held, pools, strict=True)))


def token_scalars(pieces: Pieces, layer: tuple[jax.Array, ...], *, num_tokens: int, num_cores: int) -> TokenScalars:
    """Return the scalars of a call, int32."""
    lanes, index_T = jnp.arange(PIECE), jnp.arange(num_tokens, dtype=jnp.int32)
    tokens_PN = jnp.where(lanes < pieces.count[:, None], pieces.token[:, None] + lanes, num_tokens)
    piece_PN = jnp.broadcast_to(jnp.arange(len(pieces.count))[:, None], tokens_PN.shape)
    piece_T = jnp.full(num_tokens, -1).at[tokens_PN].set(piece_PN, mode="drop")
    is_real_T = piece_T >= 0
    start_T, known_T, row_T, token_T = (
        part[piece_T] for part in (pieces.start, pieces.known, pieces.row, pieces.token)
    )
    position_T = jnp.where(is_real_T, start_T + known_T + index_T - token_T, 0)
    entries = RowEntries(*(part[piece_T] for part in pieces.entries))
    last_T = jax.lax.cummax(jnp.where(is_real_T, index_T, -1))
    before_T = jnp.concatenate([jnp.full(1, -1, jnp.int32), last_T[:-1]])
    continues_T = (before_T >= 0) & (row_T[before_T] == row_T)
    is_first_T = is_real_T & ~continues_T
    visit_T = jnp.where(is_real_T, jnp.cumsum(is_first_T, dtype=jnp.int32) - 1, -1)
    after_T = jax.lax.cummin(jnp.where(is_real_T, index_T, num_tokens), reverse=True)
    after_T = jnp.concatenate([after_T[1:], jnp.full(1, num_tokens, jnp.int32)])
    ends_T = is_real_T & ((after_T == num_tokens) | is_first_T[jnp.minimum(after_T, num_tokens - 1)])
    # Every core looks for its next visits behind the last one.
    starts_V = jnp.sort(jnp.where(is_first_T, index_T, num_tokens))
    starts_V = jnp.concatenate([starts_V, jnp.full(NUM_BUFFERS * num_cores, num_tokens, jnp.int32)])
    folds_T = (position_T % CHUNK == 0) & (position_T != entries.source_base)
    base_T = position_T // CHUNK * CHUNK - CHUNK * folds_T
    source_T = jnp.where(base_T == entries.source_base, entries.source, entries.own)
    scalars = position_T, row_T, source_T, entries.own, folds_T, visit_T, ends_T, starts_V, jnp.stack(layer)
    return TokenScalars(*(each.astype(jnp.int32) for each in scalars))


def _of_token(rows: jax.Array) -> pl.BlockSpec:
    """Return the block of a token."""
    return pl.BlockSpec((1, *rows.shape[1:]), lambda _, token, *__: (token, *[0] * (rows.ndim - 1)))
