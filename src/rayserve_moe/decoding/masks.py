"""Words that a row may be sampled from, as bits: those of a grammar, filled on the host."""

# S sampled rows   V vocabulary (local share)   W words of 32 bits

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.vocabulary_part import VocabularyPart

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """How many int32 numbers hold a bit for every id."""
    return -(-vocab_size // WORD_BITS)


@jax.named_scope("masks")
def masked(logits_SV: jax.Array, mask_SW: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Logits with the lowest finite one, which no probability is left of, for words whose bit is 0.

    `mask_SW` int32 has bit i % 32 of number i // 32 for id i, of the whole vocabulary. What is not finite stays,
    so that it is still found.
    """
    lowest = jnp.finfo(logits_SV.dtype).min
    return jnp.where(_is_allowed(mask_SW, part) | ~jnp.isfinite(logits_SV), logits_SV, lowest)


def _is_allowed(mask_SW: jax.Array, part: VocabularyPart) -> jax.Array:
    """Bits of a device's words, bool [S, V]: by slices, which unlike a gather cost nothing on a TPU."""
    num_rows, count = len(mask_SW), part.width // WORD_BITS + 2
    padded_SW = jnp.pad(mask_SW, ((0, 0), (0, mask_words(part.num_parts * part.width) + 2 - mask_SW.shape[1])))
    own_SW = jax.lax.dynamic_slice_in_dim(padded_SW, part.first // WORD_BITS, count, axis=1)
    bits_SV = (own_SW[:, :, None] >> jnp.arange(WORD_BITS)) & 1
    bits_SV = bits_SV.reshape(num_rows, count * WORD_BITS)
    return jax.lax.dynamic_slice_in_dim(bits_SV, part.first % WORD_BITS, part.width, axis=1) > 0
