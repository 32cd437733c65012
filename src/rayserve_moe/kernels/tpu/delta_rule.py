"""The recurrence of gated delta and of Mamba-2 layers in one TPU kernel (`reference.gated_delta.advance`).

A visit is the pieces of one row. Its state and its ring, up to the cursor, are copied into the core's memory while the
visits before it are computed, and only new rows of the ring go back. A token at a multiple of 64 folds the chunk before
it: it writes a state, which no other token does.

Tokens are computed in pieces of up to eight by the same operations, be they decoded, drafted or of a prompt: known ones
are taken from the ring, and a row of a piece depends on earlier rows alone. So outputs and states do not depend on how
they came. They differ from those of the reference by rounding.
"""

# T tokens   V visits   H value heads   v value width   P pieces   N tokens of a piece

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE, DeltaPools, DeltaTokens, Pieces
from rayserve_moe.kernels.tpu.delta_call import NUM_BUFFERS, PieceScalars, VisitShape, scratch_of
from rayserve_moe.kernels.tpu.delta_visits import compute_piece
from rayserve_moe.kernels.tpu.packed_rows import LANES
from rayserve_moe.kernels.tpu.paged_attention import cores_of_device
from rayserve_moe.kernels.tpu.paged_sizes import VMEM_BYTES

MAX_TOKENS = 8192
"""Maximum number of tokens whose scalars a core's scalar memory holds."""
MAX_HELD_BYTES = VMEM_BYTES * 3 // 4
"""Maximum bytes of states and rings in the core's memory."""
NUM_POOLS = len(DeltaPools._fields)


def unsupported_reason(
    tokens: DeltaTokens,
    pools: DeltaPools,
    pieces: Pieces,
    *,
    layer: tuple[jax.Array, ...],
    delta: bool = True,
    interpret: Any = False,
) -> str:
    """Return why `advance_tokens` does not take a call; empty if it does."""
    del pieces, layer, interpret
    (num_tokens, num_heads, width), key_heads = tokens.values_THv.shape, tokens.keys_TKd.shape[1]
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens, not {MAX_TOKENS} or fewer"
    num_decays, num_blocks = tokens.decay_THx.shape[2], pools.state_EHdv.shape[1]
    if num_decays > 1 and not delta:
        return "a decay per element without the delta rule"
    if num_decays > 1 and num_heads != key_heads:
        return f"{num_heads} heads with a decay per element share {key_heads} key heads"
    if (key_width := tokens.keys_TKd.shape[2]) != LANES:
        return f"keys of width {key_width}, not {LANES}"
    if pools.state_EHdv.shape[2:] != (LANES, LANES) or width * num_heads != LANES * num_blocks:
        return f"pools hold values of width {width} in rows of other widths than {LANES}"
    if num_blocks % key_heads or (delta and num_blocks < num_heads):
        return f"{num_heads} heads in {num_blocks} rows of values do not divide over {key_heads} key heads"
    if pools.decay_RCHx.shape[1:] != ((num_heads, LANES) if num_decays == 1 else (CHUNK, num_heads, LANES)):
        return "rings of decays have other places"
    if num_heads > LANES:
        return f"{num_heads} heads, not {LANES} or fewer"
    ring = CHUNK * (num_blocks + key_heads + num_heads * (num_decays > 1))
    held = 4 * LANES * (NUM_BUFFERS * (num_blocks * LANES + ring) + ring)
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
    """Compute `advance`; the pieces of a row are adjacent and in order.

    `interpret` (see `pallas_call`) runs it without a TPU.
    """
    (num_tokens, num_heads, _), num_blocks = tokens.values_THv.shape, pools.state_EHdv.shape[1]
    rows, is_sound_T = _sound_rows(tokens)
    values = rows.values_THv.reshape(num_tokens, num_blocks, LANES)
    by_element = tokens.decay_THx.shape[2] > 1
    decays = rows.decay_THx if by_element else rows.decay_THx[..., 0]
    num_cores = cores_of_device(interpret)
    dtype = jnp.bfloat16 if tokens.keys_TKd.dtype == jnp.bfloat16 else jnp.float32
    num_pieces = len(pieces.count)
    shape = VisitShape(
        num_heads,
        tokens.keys_TKd.shape[1],
        num_pieces,
        num_cores,
        dtype,
        pools.window_EJKW.shape[1],
        by_element=by_element,
        delta=delta,
        heads_of_block=num_heads // num_blocks,
    )
    scalars = piece_scalars(pieces, layer, num_cores=num_cores)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    around = (rows.queries_TKd, rows.keys_TKd, values, decays, rows.beta_TH)
    given = [*map(_around, around), tokens.inputs_TKW.astype(jnp.float32)]
    held = [*pools]
    if not interpret:
        # XLA may otherwise copy a pool that fits into the core's memory there and back.
        held = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in held]
    num_ahead = len(scalars) + len(given)
    out_THv, *held = pl.pallas_call(
        partial(compute_piece, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_pieces),
            in_specs=[*(_of_piece(part) for part in given[:-1]), hbm, *[hbm] * NUM_POOLS],
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
    out_THv = _marked(out_THv.reshape(tokens.values_THv.shape), pieces, is_sound_T)
    return out_THv, DeltaPools(*held)


def _marked(out_THv: jax.Array, pieces: Pieces, is_sound_T: jax.Array) -> jax.Array:
    """Return outputs with zeros for tokens of no piece, and NaN for tokens that are not sound."""
    lanes, num_tokens = jnp.arange(PIECE), len(out_THv)
    tokens_PN = jnp.where(lanes < pieces.count[:, None], pieces.token[:, None] + lanes, num_tokens)
    found_T11 = jnp.zeros(num_tokens, bool).at[tokens_PN].set(True, mode="drop")[:, None, None]
    return jnp.where(found_T11, jnp.where(is_sound_T[:, None, None], out_THv, jnp.nan), 0.0)


def _sound_rows(tokens: DeltaTokens) -> tuple[DeltaTokens, jax.Array]:
    """Return tokens in float32, zeros for tokens that hold a number that is not finite; and finite tokens, bool [T]."""
    wide = [part.astype(jnp.float32) for part in tokens]
    is_sound_T = jnp.stack([jnp.all(jnp.isfinite(part), axis=tuple(range(1, part.ndim))) for part in wide]).all(axis=0)
    sound = (jnp.where(is_sound_T.reshape(-1, *[1] * (part.ndim - 1)), part, 0.0) for part in wide)
    return DeltaTokens(*sound), is_sound_T


def piece_scalars(pieces: Pieces, layer: tuple[jax.Array, ...], *, num_cores: int) -> PieceScalars:
    """Return the scalars of a call, int32."""
    num_pieces = len(pieces.count)
    index_P, is_real_P = jnp.arange(num_pieces, dtype=jnp.int32), pieces.count > 0
    last_P = jax.lax.cummax(jnp.where(is_real_P, index_P, -1))
    before_P = jnp.concatenate([jnp.full(1, -1, jnp.int32), last_P[:-1]])
    continues_P = (before_P >= 0) & (pieces.row[before_P] == pieces.row)
    is_first_P = is_real_P & ~continues_P
    visit_P = jnp.where(is_real_P, jnp.cumsum(is_first_P, dtype=jnp.int32) - 1, -1)
    after_P = jax.lax.cummin(jnp.where(is_real_P, index_P, num_pieces), reverse=True)
    after_P = jnp.concatenate([after_P[1:], jnp.full(1, num_pieces, jnp.int32)])
    ends_P = is_real_P & ((after_P == num_pieces) | is_first_P[jnp.minimum(after_P, num_pieces - 1)])
    # Every core looks for its next visits behind the last one.
    starts_V = jnp.sort(jnp.where(is_first_P, index_P, num_pieces))
    starts_V = jnp.concatenate([starts_V, jnp.full(NUM_BUFFERS * num_cores, num_pieces, jnp.int32)])
    entries, start_P = pieces.entries, pieces.start
    folds_P = (start_P % CHUNK == 0) & (pieces.known == 0) & (start_P != entries.source_base)
    base_P = start_P // CHUNK * CHUNK - CHUNK * folds_P
    source_P = jnp.where(base_P == entries.source_base, entries.source, entries.own)
    of_tokens = start_P, pieces.known, pieces.count, pieces.token, pieces.row
    scalars = *of_tokens, source_P, entries.own, folds_P, visit_P, ends_P, starts_V, jnp.stack(layer)
    return PieceScalars(*(each.astype(jnp.int32) for each in scalars))


def _around(rows: jax.Array) -> jax.Array:
    """Return rows of tokens with others around them, which blocks of pieces reach; numbers of heads fill the lanes."""
    rows = rows[:, None] if rows.ndim == 2 else rows
    return jnp.pad(rows, ((PIECE, PIECE), (0, 0), (0, LANES - rows.shape[2])))


def _of_piece(rows: jax.Array) -> pl.BlockSpec:
    """Return the block of a piece: its tokens stand behind as many others as it knows."""

    def place(_: jax.Array, piece: jax.Array, *scalars: Any) -> tuple[Any, ...]:
        of = PieceScalars(*scalars)
        return (PIECE + of.token_P[piece] - of.known_P[piece], *[0] * (rows.ndim - 1))

    return pl.BlockSpec(tuple(map(pl.Element, (PIECE, *rows.shape[1:]))), place)
