"""Log-probabilities of a vocabulary that is sharded over devices; each id's value stays on its device.

Devices exchange a few numbers per row; logits are never gathered.
"""

# S rows   R rows of a block   V vocabulary (local share)   P parts   J likeliest tokens   C candidates of all parts
# L listed tokens

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.layers import NO_ID, WordMasses, best_of, masses_of
from rayserve_moe.kernels.row_blocks import in_blocks
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

Masses = Callable[[jax.Array, jax.Array, jax.Array], WordMasses]
"""`layers.masses_of`, or a kernel with the same interface."""
ROWS_OF_ENTROPY = 8
"""Rows of a block of entropies."""
LOWEST_LOGPROB = -9999.0
"""Lower bound of reported log-probabilities, also reported for tokens that cannot be sampled."""


class LogProbs(NamedTuple):
    """Log-probabilities of a device's shard, and statistics of rows that are the same on all devices."""

    logprobs_SV: jax.Array
    """Log-probabilities of the local shard, float32."""
    largest_S: jax.Array
    """Maximum log-probability over the whole vocabulary, float32."""
    best_S: jax.Array
    """Id with the maximum log-probability, int32, ties to the smaller id."""
    finite_S: jax.Array
    """bool; True if all logits of the row are finite."""


class TopTokens(NamedTuple):
    """The J most likely tokens in descending order, ties to the smaller id."""

    ids_SJ: jax.Array
    """int32 [..., J]."""
    logprobs_SJ: jax.Array
    """float32 [..., J]."""


@jax.named_scope("log_probs")
def log_probs_of(
    logits_SV: jax.Array, temperature_S: jax.Array, *, part: VocabularyPart, masses: Masses = masses_of
) -> LogProbs:
    """Return log_softmax(logits / temperature), computed with a single exchange.

    Values of rows whose logits are not all finite are meaningless. Logits are taken relative to the maximum, so no
    small temperature overflows.
    """
    num_here = jnp.clip(part.num_words - part.first, 0, part.width) if part.is_padded else jnp.int32(part.width)
    here = masses(logits_SV, temperature_S, num_here)
    id_here_S = jnp.where(here.place_S == NO_ID, NO_ID, part.first + here.place_S)
    best_PS, id_PS, mass_PS, finite_PS = part.gather(here.best_S, id_here_S, here.mass_S, here.finite_S)
    best_S, id_S = best_of(best_PS.T, id_PS.T)
    # In the order of shards, for any number of rows: the order of XLA's sums depends on shapes.
    mass_S = reduce(jnp.add, mass_PS * jnp.exp((best_PS - best_S) / temperature_S))
    # A single device uses its kernel's value: the last bits of XLA's logarithm depend on how XLA fuses it.
    log_mass_S = jnp.log(mass_S) if part.num_parts > 1 else here.log_mass_S
    logprobs_SV = (logits_SV - best_S[:, None]) / temperature_S[:, None] - log_mass_S[:, None]
    return LogProbs(logprobs_SV, 0.0 - log_mass_S, jnp.minimum(id_S, part.num_words - 1), jnp.all(finite_PS, axis=0))


def log_prob_of(logprobs_SV: jax.Array, ids_S: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Return the log-probability of `ids_S` in each row, float32 [S]."""
    is_it_SV = part.ids() == ids_S[:, None]
    return part.sum(jnp.sum(logprobs_SV, axis=-1, where=is_it_SV))


def log_probs_at(logprobs_SV: jax.Array, ids_SL: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Return log-probabilities of ids of each row, float32 [S, L], at least LOWEST_LOGPROB; 0 for negative ids."""
    places_SL = part.places(ids_SL)
    values_SL = jnp.take_along_axis(logprobs_SV, jnp.minimum(places_SL, part.width - 1), axis=1)
    return part.sum(jnp.where(places_SL < part.width, jnp.maximum(values_SL, LOWEST_LOGPROB), 0.0))


def entropy_of(logprobs_SV: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Return the entropy of each row in nats, float32 [S]; ids of probability 0 contribute nothing.

    Rows are added up in blocks of a fixed size, then in the order of shards, so that an entropy has the same bits in
    steps of all sizes.
    """

    def compute(logprobs_RV: jax.Array) -> jax.Array:
        terms_RV = -jnp.exp(logprobs_RV) * logprobs_RV
        return jnp.sum(terms_RV, axis=-1, where=jnp.isfinite(logprobs_RV))

    (of_all_PS,) = part.gather(in_blocks(compute, logprobs_SV, size=ROWS_OF_ENTROPY))
    return reduce(jnp.add, of_all_PS)


@jax.named_scope("log_probs")
def ranks_of(logprobs_SV: jax.Array, ids_S: jax.Array, own_S: jax.Array, *, part: VocabularyPart) -> jax.Array:
    """Return the rank of tokens `ids_S` with log-probabilities `own_S`, int32 [S]; 1 for the most likely.

    Ties go to the smaller id.
    """
    own_S1 = own_S[:, None]
    comes_before_SV = (logprobs_SV > own_S1) | ((logprobs_SV == own_S1) & (part.ids() < ids_S[:, None]))
    # Exact up to 2**24 ids: XLA:CPU sums floats several times as fast as integers.
    return 1 + part.sum(jnp.sum(comes_before_SV, axis=-1, dtype=jnp.float32)).astype(jnp.int32)


@jax.named_scope("log_probs")
def likeliest(logprobs_SV: jax.Array, *, num_wanted: jax.Array, max_top: int, part: VocabularyPart) -> TopTokens:
    """Return the `num_wanted` most likely tokens of each row, followed by zeros up to min(`max_top`, vocabulary size).

    Reported log-probabilities are at least LOWEST_LOGPROB. Each device finds the candidates of its shard; the result is
    the best of all candidates.
    """
    count = min(max_top, part.num_words)
    found = _falling(logprobs_SV, part.ids()[None], num_wanted, count=count)

    def of_all_parts(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values_SC, ids_SC = (of_PSJ.swapaxes(0, 1).reshape(of_PSJ.shape[1], -1) for of_PSJ in part.gather(*found))
        return _falling(values_SC, ids_SC, num_wanted, count=count)

    if part.axes:
        # No exchange if no row wants top tokens.
        found = jax.lax.cond(num_wanted > 0, of_all_parts, lambda found: found, found)
    values_SJ, ids_SJ = found
    is_wanted_J = jnp.arange(count) < num_wanted
    return TopTokens(
        jnp.where(is_wanted_J, ids_SJ, 0), jnp.where(is_wanted_J, jnp.maximum(values_SJ, LOWEST_LOGPROB), 0)
    )


def _falling(
    values_SC: jax.Array, ids_SC: jax.Array, num_wanted: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the `num_wanted` best values of each row with their ids, [S, count]; then minus infinity and NO_ID.

    Each turn finds the best of the values after the previous result, in descending order with ties to the smaller id.
    Unlike a sort, this takes no time if nothing is wanted, and compiles quickly. Minus infinity counts as the lowest
    finite number: padding has larger ids than tokens of probability 0, and so comes after them.
    """
    num_rows, lowest = len(values_SC), jnp.finfo(values_SC.dtype).min

    def find(turn: jax.Array, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values_SJ, ids_SJ, value_S, id_S = before
        # The condition on `turn` keeps this inside the loop: XLA would hoist it, even out of a loop of 0 turns.
        finite_SC = jnp.maximum(values_SC, jnp.where(turn < 0, 0, lowest))
        comes_after_SC = (finite_SC < value_S[:, None]) | ((finite_SC == value_S[:, None]) & (ids_SC > id_S[:, None]))
        left_SC, left_ids_SC = jnp.where(comes_after_SC, finite_SC, -jnp.inf), jnp.where(comes_after_SC, ids_SC, NO_ID)
        value_S, id_S = best_of(left_SC, left_ids_SC)
        return values_SJ.at[:, turn].set(value_S), ids_SJ.at[:, turn].set(id_S), value_S, id_S

    empty = jnp.full((num_rows, count), -jnp.inf, values_SC.dtype), jnp.full((num_rows, count), NO_ID, jnp.int32)
    first = (*empty, jnp.full(num_rows, jnp.inf, values_SC.dtype), jnp.full(num_rows, -1, jnp.int32))
    found = jax.lax.fori_loop(0, jnp.minimum(num_wanted, count), find, first)
    return found[:2]
