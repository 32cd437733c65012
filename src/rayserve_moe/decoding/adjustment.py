"""Changing logits before they are sampled from: biases, penalties for tokens seen before, ids that are withheld.

What a row has seen is kept as one number per word: `PROMPT_MARK` if the prompt has it, plus how often it was sampled.
So a step reads and writes the words it needs, however long the sequence is.
"""

# R rows   S sampled rows   V vocabulary   B biases of a row   N token ids

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

PROMPT_MARK = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdjustmentState:
    """What is remembered of rows that adjust their logits, int32 but for the values; stale for all others.

    Biases beyond those of a row have an id that no word has; one of -inf says that the word is withheld.
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
def adjust(logits_SV: jax.Array, state: AdjustmentState, *, rows_S: jax.Array, penalties: Penalties) -> jax.Array:
    """Adjusted float32 logits; rows that adjust nothing keep theirs to the last bit.

    Biases are added first. Then the repetition penalty divides positive and multiplies negative logits of every word
    seen in prompt or output; frequency is subtracted for each output of a word, presence once for any. Words that are
    withheld get the lowest finite logit, which no probability is left of.
    """
    # A loop of one turn or none: unlike a branch, it copies nothing where it does nothing.
    num_turns = jnp.any(penalties.is_adjusted_S).astype(jnp.int32)
    return jax.lax.fori_loop(0, num_turns, lambda _, logits: _adjust(state, rows_S, penalties, logits), logits_SV)


@jax.named_scope("row_update")
def note_samples(seen_RV: jax.Array, ids_S: jax.Array, *, rows_S: jax.Array, penalties: Penalties) -> jax.Array:
    """Count the tokens that rows have sampled."""
    counted_S = jnp.where(penalties.is_adjusted_S, rows_S, seen_RV.shape[0])
    return seen_RV.at[counted_S, ids_S].add(1, mode="drop")


def note_known(seen_V: jax.Array, ids_N: jax.Array, *, num_prompt: jax.Array, num_known: jax.Array) -> jax.Array:
    """Take over known tokens of one row: the first `num_prompt` of its prompt, others up to `num_known` sampled.

    A row's prompt has to be noted before its outputs.
    """
    places_N = jnp.arange(len(ids_N))
    nowhere = len(seen_V)
    in_prompt_N = jnp.where(places_N < num_prompt, ids_N, nowhere)
    sampled_N = jnp.where((places_N >= num_prompt) & (places_N < num_known), ids_N, nowhere)
    return seen_V.at[in_prompt_N].max(PROMPT_MARK, mode="drop").at[sampled_N].add(1, mode="drop")


def _adjust(state: AdjustmentState, rows_S: jax.Array, penalties: Penalties, logits_SV: jax.Array) -> jax.Array:
    seen_SV = state.seen_RV.at[rows_S].get(mode="clip")
    bias_ids_SB, bias_values_SB = (
        biases.at[rows_S].get(mode="clip") for biases in (state.bias_ids_RB, state.bias_values_RB)
    )
    samples_S1 = jnp.arange(len(logits_SV))[:, None]
    is_withheld_SB, nowhere = jnp.isneginf(bias_values_SB), logits_SV.shape[1]
    added_ids_SB = jnp.where(is_withheld_SB, nowhere, bias_ids_SB)
    changed_SV = logits_SV.at[samples_S1, added_ids_SB].add(bias_values_SB, mode="drop")
    repetition_S1 = penalties.repetition_S[:, None]
    repeated_SV = jnp.where(changed_SV > 0, changed_SV / repetition_S1, changed_SV * repetition_S1)
    changed_SV = jnp.where(seen_SV > 0, repeated_SV, changed_SV)
    outputs_SV = (seen_SV & (PROMPT_MARK - 1)).astype(jnp.float32)
    changed_SV -= penalties.frequency_S[:, None] * outputs_SV
    changed_SV -= penalties.presence_S[:, None] * (outputs_SV > 0)
    withheld_ids_SB = jnp.where(is_withheld_SB & penalties.withholds_S[:, None], bias_ids_SB, nowhere)
    changed_SV = changed_SV.at[samples_S1, withheld_ids_SB].set(jnp.finfo(changed_SV.dtype).min, mode="drop")
    return jnp.where(penalties.is_adjusted_S[:, None], changed_SV, logits_SV)
