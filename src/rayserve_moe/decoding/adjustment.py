"""Logit adjustment before sampling: biases, penalties for seen tokens, and withheld ids.

A row's history is a single number per vocabulary id: `PROMPT_MARK` if the prompt contains the id, plus the number of
times the id was sampled. The work of a step therefore does not depend on sequence lengths.
"""

# R rows   S sampled rows   V vocabulary (local share)   B biases of a row   N token ids

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.vocabulary_part import VocabularyPart

PROMPT_MARK = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdjustmentState:
    """Adjustment state of all rows; rows that adjust nothing hold stale entries.

    Each device holds the rows of all data ranks, in rank order.
    """

    seen_RV: jax.Array
    """History of each row over the local shard of the vocabulary, int32."""
    bias_ids_RB: jax.Array
    """Ids with a bias, int32; unused entries hold an id outside of the vocabulary."""
    bias_values_RB: jax.Array
    """Biases, float32: -inf withholds the id, inf allows it.

    If a row has an entry of inf, all ids without one are forbidden. Entries of inf come first.
    """


class Penalties(NamedTuple):
    """Penalties of each sampled row."""

    is_adjusted_S: jax.Array
    """bool; False for rows that keep their logits."""
    repetition_S: jax.Array
    """float32; 1 has no effect."""
    presence_S: jax.Array
    """float32; 0 has no effect."""
    frequency_S: jax.Array
    """float32; 0 has no effect."""
    withholds_S: jax.Array
    """bool; True while the withheld ids of the row may not be sampled."""


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
    """Return the adjusted float32 logits; rows without adjustments keep theirs bit for bit.

    `drafted_SK` int32 holds draft tokens that count as outputs of the row, -1 for none.

    Biases are added first. Then the repetition penalty divides positive logits and multiplies negative logits of ids in
    the prompt or output. The frequency penalty is subtracted once per output of an id, the presence penalty once in
    total. Withheld ids get the lowest finite logit, which gives them probability 0.
    """

    def change(turn: jax.Array, logits_SV: jax.Array) -> jax.Array:
        return _adjust(state, rows_S + (turn - 1), penalties, part, drafted_SK, logits_SV)

    return _if_any_adjusted(penalties, change, logits_SV)


@jax.named_scope("row_update")
def record_samples(
    seen_RV: jax.Array, ids_S: jax.Array, *, rows_S: jax.Array, penalties: Penalties, part: VocabularyPart
) -> jax.Array:
    """Count the tokens that the rows have sampled, and return the updated history."""
    counted_S, places_S = jnp.where(penalties.is_adjusted_S, rows_S, seen_RV.shape[0]), part.places(ids_S)

    def count(turn: jax.Array, seen_RV: jax.Array) -> jax.Array:
        return seen_RV.at[counted_S + (turn - 1), places_S].add(1, mode="drop")

    # Outside this loop the scatter copies the whole history twice, even if it changes nothing.
    return _if_any_adjusted(penalties, count, seen_RV)


def _if_any_adjusted(
    penalties: Penalties, change: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array
) -> jax.Array:
    """Return `change(1, values)` if a row has adjustments, else `values`.

    `change` must use its first argument: XLA hoists loop-invariant work, even out of a loop of 0 turns.
    """
    # A loop of 0 or 1 turns: unlike a branch, it copies nothing if it does nothing. It counts from 1 to tell estimates
    # of a step that it usually has no turn (`tools.estimate.program_ops.trips_of`).
    end = 1 + jnp.any(penalties.is_adjusted_S).astype(jnp.int32)
    return jax.lax.fori_loop(1, end, change, values)


def record_known_tokens(
    seen_V: jax.Array, ids_N: jax.Array, *, num_prompt: jax.Array, num_known: jax.Array
) -> jax.Array:
    """Return the history of a row after adding its known tokens, given in order of position.

    The first `num_prompt` ids are the prompt and ids up to `num_known` are outputs. The prompt must be recorded before
    outputs.
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
    """Return the sum of each id's biases, [S, V]; minus infinity for ids that are withheld or not allowed.

    Each bias is compared with all ids, in as many rounds as the row with the most biases needs: a scatter would process
    the entries one by one on every device.
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
