"""Log-probabilities of a vocabulary that lies in parts on several devices, each word's where it is.

What devices exchange is a few numbers per row; logits stay where they were computed.
"""

# S rows   V vocabulary (local share)   P parts   J likeliest tokens   C candidates of all parts
# L listed tokens

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.layers import NO_ID, WordMasses, best_of, masses_of
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

Masses = Callable[[jax.Array, jax.Array, jax.Array], WordMasses]
"""`layers.masses_of`, or a kernel in its place."""
LOWEST_LOGPROB = -9999.0
"""Reported for tokens that are less likely still, or cannot be sampled at all."""


class LogProbs(NamedTuple):
    """Float32 log-probabilities of a device's words; and of rows, the same on all devices: the largest of all
    log-probabilities, its id, int32 (ties to the smaller), and whether all logits were finite."""

    logprobs_SV: jax.Array
    largest_S: jax.Array
    best_S: jax.Array
    finite_S: jax.Array


class TopTokens(NamedTuple):
    """The J likeliest tokens, falling, ties to the smaller id: ids int32 [..., J], log-probabilities float32."""

    ids_SJ: jax.Array
    logprobs_SJ: jax.Array


@jax.named_scope("log_probs")
def log_probs_of(
    logits_SV: jax.Array, temperature_S: jax.Array, *, part: VocabularyPart, masses: Masses = masses_of
) -> LogProbs:
    """log_softmax(logits / temperature) by one exchange; what comes of rows that are not finite is meaningless.

    Relative to the best logit, no temperature is small enough to overflow what comes out.
    """
    num_here = jnp.clip(part.num_words - part.first, 0, part.width) if part.is_padded else jnp.int32(part.width)
    here = masses(logits_SV, temperature_S, num_here)
    id_here_S = jnp.where(here.place_S == NO_ID, NO_ID, part.first + here.place_S)
    best_PS, id_PS, mass_PS, finite_PS = part.gather(here.best_S, id_here_S, here.mass_S, here.finite_S)
    best_S, id_S = best_of(best_PS.T, id_PS.T)
    mass_S = jnp.sum(mass_PS * jnp.exp((best_PS - best_S) / temperature_S), axis=0)
    # Alone a device takes what its kernel says: XLA's logarithm has bits that depend on what it is computed with.
    log_mass_S = jnp.log(mass_S) if part.num_parts > 1 else here.log_mass_S
    logprobs_SV = (logits_SV - best_S[:, None]) / temperature_S[:, None] - log_mass_S[:, None]
    return LogProbs(logprobs_SV, 0.0 - log_mass_S, jnp.minimum(id_S, part.num_words - 1), jnp.all(finite_PS, axis=0))


def log_prob_of(logprobs_SV: jax.Array, ids_S: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Log-probability of one token of each row, float32 [S]."""
    is_it_SV = part.ids() == ids_S[:, None]
    return part.sum(jnp.sum(logprobs_SV, axis=-1, where=is_it_SV))


def log_probs_at(logprobs_SV: jax.Array, ids_SL: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Log-probabilities of several tokens of each row, float32 [S, L], LOWEST_LOGPROB at least; 0 for ids below 0."""
    places_SL = part.places(ids_SL)
    values_SL = jnp.take_along_axis(logprobs_SV, jnp.minimum(places_SL, part.width - 1), axis=1)
    return part.sum(jnp.where(places_SL < part.width, jnp.maximum(values_SL, LOWEST_LOGPROB), 0.0))


def entropy_of(logprobs_SV: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Entropy of each row in nats, float32 [S]; what has no probability adds nothing."""
    terms_SV = -jnp.exp(logprobs_SV) * logprobs_SV
    return part.sum(jnp.sum(terms_SV, axis=-1, where=jnp.isfinite(logprobs_SV)))


@jax.named_scope("log_probs")
def ranks_of(logprobs_SV: jax.Array, ids_S: jax.Array, own_S: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Place of a token with log-probability `own_S` among all in falling order, ties to the smaller id, int32 [S]; the
    likeliest has 1."""
    own_S1 = own_S[:, None]
    comes_before_SV = (logprobs_SV > own_S1) | ((logprobs_SV == own_S1) & (part.ids() < ids_S[:, None]))
    # Exact up to 2**24 words: XLA:CPU adds up floats several times as fast as integers.
    return 1 + part.sum(jnp.sum(comes_before_SV, axis=-1, dtype=jnp.float32)).astype(jnp.int32)


@jax.named_scope("log_probs")
def likeliest(logprobs_SV: jax.Array, *, num_wanted: jax.Array, max_top: int, part: VocabularyPart) -> TopTokens:
    """The `num_wanted` likeliest tokens of each row in `max_top` places, or as many as there are words; then zeros.

    Log-probabilities are reported as LOWEST_LOGPROB at least. Every device finds those of its words, and the likeliest
    of these are those of all.
    """
    count = min(max_top, part.num_words)
    found = _falling(logprobs_SV, part.ids()[None], num_wanted, count=count)

    def of_all_parts(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values_SC, ids_SC = (of_PSJ.swapaxes(0, 1).reshape(of_PSJ.shape[1], -1) for of_PSJ in part.gather(*found))
        return _falling(values_SC, ids_SC, num_wanted, count=count)

    if part.axes:
        # Nothing is exchanged where nothing is wanted.
        found = jax.lax.cond(num_wanted > 0, of_all_parts, lambda found: found, found)
    values_SJ, ids_SJ = found
    is_wanted_J = jnp.arange(count) < num_wanted
    return TopTokens(
        jnp.where(is_wanted_J, ids_SJ, 0), jnp.where(is_wanted_J, jnp.maximum(values_SJ, LOWEST_LOGPROB), 0)
    )


def _falling(
    values_SC: jax.Array, ids_SC: jax.Array, num_wanted: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array]:
    """The `num_wanted` best of each row with their ids, [S, count]; then minus infinity and NO_ID.

    Each is the best of those that come after the one before, in falling order with ties to the smaller id: unlike a
    sort, that takes no time where nothing is wanted, and little to compile. Minus infinity counts as the lowest number:
    what is no word has larger ids than words of no probability, and comes after them.
    """
    num_rows, lowest = len(values_SC), jnp.finfo(values_SC.dtype).min

    def find(turn: jax.Array, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values_SJ, ids_SJ, value_S, id_S = before
        # Of the turn in name: XLA would compute it ahead of the loop, for no turn as well.
        finite_SC = jnp.maximum(values_SC, jnp.where(turn < 0, 0, lowest))
        comes_after_SC = (finite_SC < value_S[:, None]) | ((finite_SC == value_S[:, None]) & (ids_SC > id_S[:, None]))
        left_SC, left_ids_SC = jnp.where(comes_after_SC, finite_SC, -jnp.inf), jnp.where(comes_after_SC, ids_SC, NO_ID)
        value_S, id_S = best_of(left_SC, left_ids_SC)
        return values_SJ.at[:, turn].set(value_S), ids_SJ.at[:, turn].set(id_S), value_S, id_S

    empty = jnp.full((num_rows, count), -jnp.inf, values_SC.dtype), jnp.full((num_rows, count), NO_ID, jnp.int32)
    first = (*empty, jnp.full(num_rows, jnp.inf, values_SC.dtype), jnp.full(num_rows, -1, jnp.int32))
    found = jax.lax.fori_loop(0, jnp.minimum(num_wanted, count), find, first)
    return found[:2]
