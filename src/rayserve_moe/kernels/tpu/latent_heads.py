"""Products of latent attention per head in TPU kernels: queries into the latent space, attended latents to values.

The matrices of a layer are read in place, those of a set of heads while the previous set is multiplied. XLA copies the
layer's matrices to HBM first if a step has many tokens, and queries between the orders by head and by token.
"""

# T tokens   A query heads   n head width without position   r rotated width   H heads * (n + r)   C latent
# X lanes of a query: latent | rotated, 0   Y its lanes behind the latent   v value width

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import ProjectedRows
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.tpu.packed_rows import LANES, latent_lanes

SET_HEADS = 16
"""Heads of a set: whole registers of 16-bit numbers."""
MAX_TILE_TOKENS = 128
MAX_TOKENS = 1024
"""Maximum number of tokens of a call. XLA multiplies larger calls."""
VMEM_BYTES = 48 << 20


def absorb(
    queries_TH: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    config: LatentConfig,
    interpret: Any = False,
    **_: Any,
) -> jax.Array:
    """Compute `latent_attention.absorb` for calls that `unsupported_absorb` accepts.

    Queries are rounded, and padded with zeros to whole registers. `interpret` (see `pallas_call`) runs it without a
    TPU.

    Returns: [T, A, X].
    """
    k_b_LHC, num_tokens = stacked.of_layers["k_b_LHC"], len(queries_TH)
    latent = k_b_LHC.shape[2]
    num_heads = k_b_LHC.shape[1] // config.nope_dim
    width = queries_TH.shape[1] // num_heads
    lanes = latent_lanes(latent + width - config.nope_dim)
    heads, tile = heads_of_a_set(num_heads), min(num_tokens, MAX_TILE_TOKENS)
    turning = width - config.nope_dim
    angles = angles_of_lanes(part.rotation, turning, lanes - latent, interleaved=config.interleaved_rotation)
    of_tokens = pl.BlockSpec((tile, lanes - latent), lambda _, i, __: (i, 0))
    return pl.pallas_call(
        partial(_absorb, config=config, pairs=part.rotation.cos.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_heads // heads, pl.cdiv(num_tokens, tile)),
            in_specs=[
                pl.BlockSpec((tile, heads * width), lambda of, i, _: (i, of)),
                of_tokens,
                of_tokens,
                _matrices(heads * config.nope_dim, latent),
            ],
            out_specs=pl.BlockSpec((tile, heads, lanes), lambda of, i, _: (i, of, 0)),
            scratch_shapes=_wide(tile * heads, lanes),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, lanes), queries_TH.dtype),
        compiler_params=_parameters(),
        name="absorb_queries",
        interpret=interpret,
    )(_scalars(stacked.layer), queries_TH, *angles, k_b_LHC)


def expand(
    attended_TAC: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    interpret: Any = False,
    **_: Any,
) -> jax.Array:
    """Compute `latent_attention.expand` for calls that `unsupported_expand` accepts, in the dtype of `attended_TAC`.

    Returns: [T, A, v].
    """
    v_b_LHC, (num_tokens, num_heads, latent) = stacked.of_layers["v_b_LHC"], attended_TAC.shape
    width = v_b_LHC.shape[1] // num_heads
    heads, tile = heads_of_a_set(num_heads), min(num_tokens, MAX_TILE_TOKENS)
    values_TH = pl.pallas_call(
        _expand,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_heads // heads, pl.cdiv(num_tokens, tile)),
            in_specs=[
                pl.BlockSpec((tile, heads, latent), lambda of, i, _: (i, of, 0)),
                _matrices(heads * width, latent),
            ],
            out_specs=pl.BlockSpec((tile, heads * width), lambda of, i, _: (i, of)),
            scratch_shapes=_wide(tile * heads, latent),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads * width), attended_TAC.dtype),
        compiler_params=_parameters(),
        name="expand_values",
        interpret=interpret,
    )(_scalars(stacked.layer), attended_TAC, v_b_LHC)
    return values_TH.reshape(num_tokens, num_heads, width)


def _wide(rows: int, lanes: int) -> list[Any]:
    """Return scratch for rows of 32 bits, register by register: only such rows are stored and read in strides."""
    return [pltpu.VMEM((rows, LANES), jnp.float32)] * (lanes // LANES)


def _matrices(rows: int, latent: int) -> pl.BlockSpec:
    """Return the block spec of a set's matrices in the layer that is given as a scalar."""
    return pl.BlockSpec((None, rows, latent), lambda of, _, layer: (layer[0], of, 0))


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY), vmem_limit_bytes=VMEM_BYTES)


def _scalars(layer: jax.Array) -> jax.Array:
    return jnp.asarray(layer, jnp.int32).reshape(1)


def heads_of_a_set(num_heads: int) -> int:
    """Return the number of heads that a visit multiplies; 0 if heads do not fill sets."""
    if num_heads <= SET_HEADS:
        return num_heads
    return 0 if num_heads % SET_HEADS else SET_HEADS


def angles_of_lanes(rotation: Rotation, width: int, lanes: int, *, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Return the factors of each lane itself and of its partner in a rotated pair, float32 [T, Y].

    Lanes hold `width` elements, then zeros. Only the first elements rotate.
    """
    cos_Tr, sin_Tr = rotation
    pairs = [(cos_Tr, cos_Tr), (-sin_Tr, sin_Tr)]
    if interleaved:
        own_TY, partners_TY = (jnp.stack(pair, axis=2).reshape(len(cos_Tr), -1) for pair in pairs)
    else:
        own_TY, partners_TY = (jnp.concatenate(pair, axis=1) for pair in pairs)
    still = width - own_TY.shape[1]
    own_TY = jnp.pad(own_TY, ((0, 0), (0, still)), constant_values=1.0)
    own_TY = jnp.pad(own_TY, ((0, 0), (0, lanes - width)))
    return own_TY, jnp.pad(partners_TY, ((0, 0), (0, lanes - partners_TY.shape[1])))


def _absorb(*refs: Any, config: LatentConfig, pairs: int) -> None:
    """Multiply and rotate head by head. Rows of other heads lie between those of a head, so rows have 32 bits."""
    _, queries, own, partners, matrices, out, *wide = refs
    num_tokens, num_heads, _ = out.shape
    width, nope = queries.shape[1] // num_heads, config.nope_dim
    own_TY, partners_TY = own[...], partners[...]
    reach = 1 if config.interleaved_rotation else max(pairs, 1)
    lane_TY = jax.lax.broadcasted_iota(jnp.int32, own_TY.shape, 1)
    is_first_TY = jax.lax.rem(jax.lax.div(lane_TY, reach), 2) == 0
    for i in range(num_heads):
        query, matrix = queries[:, i * width : (i + 1) * width], matrices[i * nope : (i + 1) * nope, :]
        absorbed_TC = jnp.dot(query[:, :nope], matrix, preferred_element_type=jnp.float32)
        turning_TY = jnp.pad(query[:, nope:].astype(jnp.float32), ((0, 0), (0, own_TY.shape[1] - (width - nope))))
        after, before = (pltpu.roll(turning_TY, by % own_TY.shape[1], 1) for by in (-reach, reach))
        turned_TY = turning_TY * own_TY + jnp.where(is_first_TY, after, before) * partners_TY
        row_TX = jnp.concatenate([absorbed_TC, turned_TY], axis=1)
        for of, register in enumerate(wide):
            register[pl.ds(i, num_tokens, stride=num_heads), :] = row_TX[:, of * LANES : (of + 1) * LANES]
    for of, register in enumerate(wide):
        rows_TAl = register[...].astype(out.dtype).reshape(num_tokens, num_heads, LANES)
        out[..., of * LANES : (of + 1) * LANES] = rows_TAl


def _expand(*refs: Any) -> None:
    """Multiply head by head."""
    _, attended, matrices, out, *wide = refs
    num_tokens, num_heads, _ = attended.shape
    width = matrices.shape[0] // num_heads
    for of, register in enumerate(wide):
        rows_TAl = attended[..., of * LANES : (of + 1) * LANES]
        register[...] = rows_TAl.astype(jnp.float32).reshape(register.shape)
    for i in range(num_heads):
        rows = pl.ds(i, num_tokens, stride=num_heads)
        latents_TC = jnp.concatenate([register[rows, :] for register in wide], axis=1).astype(attended.dtype)
        matrix = matrices[i * width : (i + 1) * width, :]
        values_Tv = jax.lax.dot_general(
            latents_TC, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        out[:, i * width : (i + 1) * width] = values_Tv.astype(out.dtype)


def unsupported_absorb(
    queries_TH: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    config: LatentConfig,
    adapters: LayerAdapters | None = None,
    query_scale_T: jax.Array | None = None,
    **_: Any,
) -> str:
    """Return why `absorb` does not take a call; empty if it does."""
    del part
    if query_scale_T is not None:
        return "queries are scaled by position"
    (num_tokens, width), k_b_LHC = queries_TH.shape, stacked.of_layers["k_b_LHC"]
    return unsupported_heads(k_b_LHC, num_tokens, k_b_LHC.shape[1] // config.nope_dim, width=width, adapters=adapters)


def unsupported_expand(
    attended_TAC: jax.Array,
    part: ProjectedRows,
    stacked: StackedWeights,
    *,
    adapters: LayerAdapters | None = None,
    **_: Any,
) -> str:
    """Return why `expand` does not take a call; empty if it does."""
    del part
    v_b_LHC, num_heads = stacked.of_layers["v_b_LHC"], attended_TAC.shape[1]
    return unsupported_heads(v_b_LHC, len(attended_TAC), num_heads, width=v_b_LHC.shape[1], adapters=adapters)


def unsupported_heads(
    matrices_LHC: jax.Array, num_tokens: int, num_heads: int, *, width: int, adapters: LayerAdapters | None
) -> str:
    """Return why tokens with `width` elements of all heads are not multiplied; empty if they are."""
    if adapters is not None:
        return "tokens have adapters"
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens, more than {MAX_TOKENS}"
    heads = heads_of_a_set(num_heads)
    if not heads:
        return f"{num_heads} heads are no multiple of {SET_HEADS}"
    if heads < num_heads and width // num_heads * heads % LANES:
        return f"{heads} heads of {width // num_heads} elements fill no registers"
    return (
        "" if matrices_LHC.shape[2] % LANES == 0 else f"latents of {matrices_LHC.shape[2]} elements fill no registers"
    )
