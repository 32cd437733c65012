"""Changing logits before they are sampled from: biases, penalties for tokens seen before, ids that are withheld.

What a row has seen is kept as one number per word: `PROMPT_MARK` if the prompt has it, plus how often it was sampled.
So a step reads and writes the words it needs, however long the sequence is.
"""

# R rows   S sampled rows   V vocabulary (local share)   B biases of a row   N token ids

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.vocabulary_part import VocabularyPart

PROMPT_MARK = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdjustmentState:
    """What is remembered of rows that adjust their logits, int32 but for the values; stale for all others.

    Every device has the rows of all data ranks, rank after rank: their biases, and what they have seen of its words.
    Biases beyond those of a row have an id that no word has; one of -inf says that the word is withheld, one of inf,
    which come first, that only such words are not.
    """

    seen_RV: jax.Array
    bias_ids_RB: jax.Array
    bias_values_RB: jax.Array


class Penalties(NamedTuple):
    """Whether each sampled row adjusts its logits, bool [S], by which penalties, float32 [S], and whether words are
    withheld from it, bool [S]."""

    is_adjusted_S: jax.Array
    repetition_S: jax.Array
    presence_S: jax.Array
    frequency_S: jax.Array
    withholds_S: jax.Array


@jax.named_scope("adjustment")
def adjust(
    logits_SV: jax.Array,
    state: AdjustmentState,
    *,
    rows_S: jax.Array,
    penalties: Penalties,
    part: VocabularyPart,
    drafted_SK: jax.Array | None = None,
) -> jax.Array:
    """Adjusted float32 logits; rows that adjust nothing keep theirs to the last bit.

    `drafted_SK` int32 are tokens that count as outputs of a row besides those it has seen; -1: none.

    Biases are added first. Then the repetition penalty divides positive and multiplies negative logits of every word
    seen in prompt or output; frequency is subtracted for each output of a word, presence once for any. Words that are
    withheld get the lowest finite logit, which no probability is left of.
    """
    # A loop of one turn or none: unlike a branch, it copies nothing where it does nothing.
    num_turns = jnp.any(penalties.is_adjusted_S).astype(jnp.int32)

    def change(turn: jax.Array, logits_SV: jax.Array) -> jax.Array:
        # Rows of this turn in name: XLA computes ahead of a loop what does not depend on its turn, for no turn as well.
        return _adjust(state, rows_S + turn, penalties, part, drafted_SK, logits_SV)

    return jax.lax.fori_loop(0, num_turns, change, logits_SV)


@jax.named_scope("row_update")
def note_samples(
    seen_RV: jax.Array, ids_S: jax.Array, *, rows_S: jax.Array, penalties: Penalties, part: VocabularyPart
) -> jax.Array:
    """Count the tokens that rows have sampled."""
    counted_S = jnp.where(penalties.is_adjusted_S, rows_S, seen_RV.shape[0])
    return seen_RV.at[counted_S, part.places(ids_S)].add(1, mode="drop")


def note_known(seen_V: jax.Array, ids_N: jax.Array, *, num_prompt: jax.Array, num_known: jax.Array) -> jax.Array:
    """Take over known tokens of one row: the first `num_prompt` of its prompt, others up to `num_known` sampled.

    A row's prompt has to be noted before its outputs.
    """
    places_N = jnp.arange(len(ids_N))
    nowhere = len(seen_V)
    in_prompt_N = jnp.where(places_N < num_prompt, ids_N, nowhere)
    sampled_N = jnp.where((places_N >= num_prompt) & (places_N < num_known), ids_N, nowhere)
    return seen_V.at[in_prompt_N].max(PROMPT_MARK, mode="drop").at[sampled_N].add(1, mode="drop")


def _adjust(
    state: AdjustmentState,
    rows_S: jax.Array,
    penalties: Penalties,
    part: VocabularyPart,
    drafted_SK: jax.Array | None,
    logits_SV: jax.Array,
) -> jax.Array:
    seen_SV = state.seen_RV.at[rows_S].get(mode="clip")
    for drafted_S in () if drafted_SK is None else drafted_SK.T:
        seen_SV += part.ids() == drafted_S[:, None]
    added_SV = _bias_of_words(state, rows_S, penalties, part)
    is_withheld_SV = jnp.isneginf(added_SV)
    changed_SV = logits_SV + jnp.where(is_withheld_SV, 0, added_SV)
    repetition_S1 = penalties.repetition_S[:, None]
    repeated_SV = jnp.where(changed_SV > 0, changed_SV / repetition_S1, changed_SV * repetition_S1)
    changed_SV = jnp.where(seen_SV > 0, repeated_SV, changed_SV)
    outputs_SV = (seen_SV & (PROMPT_MARK - 1)).astype(jnp.float32)
    changed_SV -= penalties.frequency_S[:, None] * outputs_SV
    changed_SV -= penalties.presence_S[:, None] * (outputs_SV > 0)
    changed_SV = jnp.where(is_withheld_SV, jnp.finfo(changed_SV.dtype).min, changed_SV)
    return jnp.where(penalties.is_adjusted_S[:, None], changed_SV, logits_SV)


def _bias_of_words(state: AdjustmentState, rows_S: jax.Array, penalties: Penalties, part: VocabularyPart) -> jax.Array:
    """The sum of each word's biases, [S, V]; minus infinity where it is withheld now, or not among those allowed.

    As many comparisons with all words as the row with most biases has: a scatter would take one entry after the other
    of every row, on every device.
    """
    ids_SB, values_SB = (biases.at[rows_S].get(mode="clip") for biases in (state.bias_ids_RB, state.bias_values_RB))
    is_withheld_SB = jnp.isneginf(values_SB)
    values_SB = jnp.where(is_withheld_SB & ~penalties.withholds_S[:, None], 0, values_SB)
    is_bias_SB = penalties.is_adjusted_S[:, None] & (ids_SB < part.num_words)
    places_B = jnp.arange(1, ids_SB.shape[1] + 1)
    num_places = jnp.max(jnp.where(is_bias_SB, places_B, 0))
    is_limited_S1 = jnp.any(is_bias_SB & jnp.isposinf(values_SB), axis=1, keepdims=True)
    start_SV = jnp.broadcast_to(jnp.where(is_limited_S1, -jnp.inf, 0.0), (len(ids_SB), part.width))

    def add(place: jax.Array, added_SV: jax.Array) -> jax.Array:
        id_S1, value_S1 = (
            jax.lax.dynamic_slice_in_dim(of_row_SB, place, 1, axis=1) for of_row_SB in (ids_SB, values_SB)
        )
        sum_SV = jnp.where(jnp.isposinf(value_S1), 0, added_SV + value_S1)
        return jnp.where(part.ids() == id_S1, sum_SV, added_SV)

    return jax.lax.fori_loop(0, num_places, add, start_SV.astype(jnp.float32))
