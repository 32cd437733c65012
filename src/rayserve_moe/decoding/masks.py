"""Token masks as bits, such as a grammar's, filled on the host."""

# S sampled rows   V vocabulary (local share)   W int32 numbers of a mask

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.vocabulary_part import VocabularyPart

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 numbers that hold a bit for every id."""
    return -(-vocab_size // WORD_BITS)


@jax.named_scope("masks")
def masked(logits_SV: jax.Array, mask_SW: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Return the logits with the lowest finite value, which has probability 0, for ids whose bit is 0.

    `mask_SW` int32 covers the whole vocabulary: id i is bit i % 32 of number i // 32. Logits that are not finite stay,
    so that later checks find them.
    """
    lowest = jnp.finfo(logits_SV.dtype).min
    return jnp.where(_is_allowed(mask_SW, part) | ~jnp.isfinite(logits_SV), logits_SV, lowest)


def _is_allowed(mask_SW: jax.Array, part: VocabularyPart) -> jax.Array:
    """Return the bits of the local shard, bool [S, V]; slices are cheap on a TPU, a gather is not."""
    num_rows, count = len(mask_SW), part.width // WORD_BITS + 2
    padded_SW = jnp.pad(mask_SW, ((0, 0), (0, mask_words(part.num_parts * part.width) + 2 - mask_SW.shape[1])))
    own_SW = jax.lax.dynamic_slice_in_dim(padded_SW, part.first // WORD_BITS, count, axis=1)
    bits_SV = (own_SW[:, :, None] >> jnp.arange(WORD_BITS)) & 1
    bits_SV = bits_SV.reshape(num_rows, count * WORD_BITS)
    return jax.lax.dynamic_slice_in_dim(bits_SV, part.first % WORD_BITS, part.width, axis=1) > 0
