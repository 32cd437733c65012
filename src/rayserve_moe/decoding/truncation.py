"""Truncation by top-k, top-p and min-p, in this order, by binary search instead of a sort.

Each limit keeps a prefix of the row's tokens in descending order of log-probability, ties to the smaller id. Their
intersection is therefore described by its last token. Probabilities are summed as integers, which is exact in any
order.
"""

# S sampled rows   V vocabulary (local share)   P parts   C candidates of a round   X sums

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.vocabulary_part import VocabularyPart

MASS_OF_ONE = 1 << 30
"""Mass of probability 1; each token's mass is rounded to an integer."""

DIGIT_BITS = 2
"""Bits of a threshold that each search round finds; a round computes a sum for each nonzero digit."""

MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1


class Limits(NamedTuple):
    """Parameters of truncation per sampled row, [S], named as the columns of `RowFloats` or `RowIntegers`."""

    top_k_S: jax.Array
    """uint32; 0 keeps all."""
    top_p_S: jax.Array
    """float32; 1 keeps all."""
    min_p_S: jax.Array
    """float32; 0 keeps all."""


class LastKept(NamedTuple):
    """The last kept token of each row, int32 [S]."""

    key_S: jax.Array
    """Key of its log-probability (`_keys`)."""
    place_S: jax.Array
    """Tie-break between equal keys (`_places`)."""


def are_limited(limits: Limits) -> jax.Array:
    """Return True for each row with a limit, bool [S]."""
    return (limits.top_k_S > 0) | (limits.top_p_S < 1.0) | (limits.min_p_S > 0.0)


def keep_all(num_rows: int) -> LastKept:
    """Return the entries that keep every token, for `num_rows` rows."""
    return LastKept(jnp.full(num_rows, MIN_INT32, jnp.int32), jnp.zeros(num_rows, jnp.int32))


def is_kept(logprobs_SV: jax.Array, last: LastKept, *, part: VocabularyPart) -> jax.Array:
    """Return True for each token up to the last kept token of its row, bool [S, V]."""
    return _is_within(_keys(logprobs_SV), last, part)


def _is_within(keys_SV: jax.Array, last: LastKept, part: VocabularyPart) -> jax.Array:
    key_S1 = last.key_S[:, None]
    return (keys_SV > key_S1) | ((keys_SV == key_S1) & (_places(part) >= last.place_S[:, None]))


def last_kept(logprobs_SV: jax.Array, limits: Limits, *, part: VocabularyPart) -> LastKept:
    """Return the last token of each row that top-k, top-p and min-p all keep; the most likely token is always kept.

    Top-k keeps `top_k` tokens (0: all). Top-p keeps a token if the mass of the tokens before it is less than `top_p`
    times the mass that top-k kept, computed in float32 (1: all). Min-p keeps tokens whose probability is at least
    `min_p` times the maximum.
    """
    keys_SV, probs_SV = _keys(logprobs_SV), jnp.exp(logprobs_SV)
    masses_SV = jnp.round(probs_SV * MASS_OF_ONE).astype(jnp.int32)
    max_S = jnp.where(limits.top_k_S == 0, MAX_INT32, jnp.minimum(limits.top_k_S, MAX_INT32)).astype(jnp.int32)

    def cut(is_top_p: jax.Array, last: LastKept) -> LastKept:
        left_SV = jnp.where(_is_within(keys_SV, last, part), jnp.where(is_top_p, masses_SV, 1), 0)
        share_S = jnp.ceil(limits.top_p_S * part.sum(left_SV.sum(-1)).astype(jnp.float32)).astype(jnp.int32)
        share_S = jnp.where(limits.top_p_S < 1.0, jnp.maximum(share_S, 1), MAX_INT32)
        return _earlier(last, _prefix(keys_SV, left_SV, limit_S=jnp.where(is_top_p, share_S, max_S), part=part))

    # A loop of two turns, top-k and top-p, compiles the search only once.
    last = jax.lax.fori_loop(0, 2, cut, keep_all(len(logprobs_SV)))
    (largest_PS,) = part.gather(probs_SV.max(-1))
    largest_S = largest_PS.max(0)
    min_prob_S = limits.min_p_S * largest_S
    is_likely_SV = probs_SV >= min_prob_S[:, None]
    (floor_PS,) = part.gather(jnp.min(keys_SV, axis=-1, where=is_likely_SV, initial=MAX_INT32))
    floor_S = floor_PS.min(0)
    return _earlier(last, LastKept(floor_S, jnp.zeros_like(floor_S)))


def _earlier(first: LastKept, second: LastKept) -> LastKept:
    is_first_S = (first.key_S > second.key_S) | ((first.key_S == second.key_S) & (first.place_S > second.place_S))
    return LastKept(*(jnp.where(is_first_S, a, b) for a, b in zip(first, second, strict=True)))


def _prefix(keys_SV: jax.Array, masses_SV: jax.Array, *, limit_S: jax.Array, part: VocabularyPart) -> LastKept:
    """Return the last token with less than `limit_S` mass before it; MAX_INT32 is no limit."""
    is_limited = jnp.any(limit_S < MAX_INT32)
    key_S = _threshold(keys_SV, masses_SV, limit_S, lowest=MIN_INT32, num_bits=32 * is_limited, part=part)
    is_tie_SV = keys_SV == key_S[:, None]
    before_S = jnp.sum(masses_SV, axis=-1, where=keys_SV > key_S[:, None])
    masses_SV = jnp.where(is_tie_SV, masses_SV, 0)
    sums_XS = jnp.stack([before_S, masses_SV.sum(-1), jnp.sum(is_tie_SV, axis=-1, dtype=jnp.int32)])
    before_S, mass_S, num_ties_S = part.sum(sums_XS)
    left_S = limit_S - before_S
    num_places = part.num_parts * part.width
    num_bits = (num_places - 1).bit_length() * jnp.any((num_ties_S > 1) & (mass_S > left_S))
    return LastKept(key_S, _threshold(_places(part)[None], masses_SV, left_S, lowest=0, num_bits=num_bits, part=part))


def _threshold(
    values_SV: jax.Array,
    masses_SV: jax.Array,
    limit_S: jax.Array,
    *,
    lowest: int,
    num_bits: jax.Array,
    part: VocabularyPart,
) -> jax.Array:
    """Return the largest threshold such that values at or above it have a mass of `limit_S`, int32 [S]; else `lowest`.

    It is found digit by digit from `lowest` up to `2**num_bits` above it; with 0 bits the loop has no rounds.
    Vocabulary shards exchange the masses above a round's candidates.
    """
    digits_C = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32)
    num_rounds = (num_bits + DIGIT_BITS - 1) // DIGIT_BITS

    def find_digit(turn: jax.Array, found_S: jax.Array) -> jax.Array:
        shift = DIGIT_BITS * (num_rounds - 1 - turn)
        tried_SC = found_S[:, None] + (digits_C << shift)
        is_above_SCV = values_SV[:, None] >= tried_SC[:, :, None]
        mass_SC = part.sum(jnp.sum(jnp.where(is_above_SCV, masses_SV[:, None], 0), axis=-1))
        digit_S = jnp.sum(mass_SC >= limit_S[:, None], axis=-1, dtype=jnp.int32)
        return found_S + (digit_S << shift)

    return jax.lax.fori_loop(0, num_rounds, find_digit, jnp.full_like(limit_S, lowest))


def _keys(logprobs_SV: jax.Array) -> jax.Array:
    """Return integers in the same order as the floats."""
    bits_SV = jax.lax.bitcast_convert_type(logprobs_SV, jnp.int32)
    return jnp.where(bits_SV < 0, bits_SV ^ MAX_INT32, bits_SV)


def _places(part: VocabularyPart) -> jax.Array:
    """Return tie-breaks that decrease with the id, int32 [V], so that the smaller id is kept first."""
    return part.num_parts * part.width - 1 - part.ids()
