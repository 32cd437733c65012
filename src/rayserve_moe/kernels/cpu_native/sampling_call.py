"""Native CPU kernels of truncation, as functions of arrays of a whole vocabulary."""

# S sampled rows   V vocabulary   W int32 numbers of a mask

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.cpu_native.calls import PREFIX


def last_kept(
    logprobs_SV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array, min_p_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the last token of each row that all limits keep, as `truncation.last_kept` of a whole vocabulary.

    Returns: keys of log-probabilities and places, int32 [S] each. The same tokens are kept; a place may differ if no
    token between the two has that log-probability.
    """
    shape = jax.ShapeDtypeStruct(top_k_S.shape, jnp.int32)
    call = jax.ffi.ffi_call(f"{PREFIX}truncate", (shape, shape))
    key_S, place_S = call(logprobs_SV, jnp.exp(logprobs_SV), top_k_S, top_p_S, min_p_S)
    return key_S, place_S


def kept_words(
    logprobs_SV: jax.Array,
    last: tuple[jax.Array, jax.Array],
    ids_S: jax.Array,
    *,
    temperature_S: jax.Array,
    num_words: int,
) -> tuple[jax.Array, jax.Array]:
    """Return `evidence.sampling_mask` of a whole vocabulary: int32 [S, W] bits and float32 [S] log-probs."""
    num_rows, width = logprobs_SV.shape
    bits = jax.ShapeDtypeStruct((num_rows, -(-width // 32)), jnp.int32)
    shapes = bits, jax.ShapeDtypeStruct(ids_S.shape, jnp.float32)
    call = jax.ffi.ffi_call(f"{PREFIX}keptwords", shapes)
    bits_SW, own_S = call(logprobs_SV, jnp.exp(logprobs_SV), *last, ids_S, temperature_S, jnp.int32(num_words))
    return bits_SW, own_S
