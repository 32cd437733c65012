"""What is reported of samples beside their own log-probabilities: those of listed ids, entropy, the model's own."""

# S sampled rows   V vocabulary (local share)   W words of 32 bits   F what is asked: a distribution, then listed ids

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.log_probs import (
    Masses,
    TopTokens,
    entropy_of,
    likeliest,
    log_prob_of,
    log_probs_at,
    log_probs_of,
    ranks_of,
)
from rayserve_moe.decoding.masks import WORD_BITS, mask_words
from rayserve_moe.decoding.sampling import Sampled, SamplingBatch
from rayserve_moe.decoding.truncation import is_kept, last_kept
from rayserve_moe.parallel.vocabulary_part import VocabularyPart


class EvidenceLogits(NamedTuple):
    """The model's own logits, float32 [S, V], and those that a sample was drawn from before truncation."""

    raw_SV: jax.Array
    processed_SV: jax.Array


@jax.named_scope("evidence")
def with_evidence(
    sampled: Sampled,
    logits: EvidenceLogits,
    *,
    asked_SF: jax.Array,
    rows: SamplingBatch,
    part: VocabularyPart,
    masses: Masses,
) -> tuple[Sampled, jax.Array]:
    """The samples, and evidence of them, float32 [S, F]: entropy, then log-probs of the listed ids.

    `asked_SF` int32 [S, F] has per row what its evidence is of, then ids, -1 for none. 0 stands for the distribution
    that was sampled before truncation; 1 for the model's own, at temperature 1, of which the sample's log-prob, its
    rank and the likeliest tokens are then as well; -1 asks for nothing. 2 more asks for `sampling_support`.
    """
    most_top = sampled.top.ids_SJ.shape[1]

    def found() -> tuple[Sampled, jax.Array]:
        is_raw_S = (asked_SF[:, 0] == 1) | (asked_SF[:, 0] == 3)
        temperature_S = jnp.where(is_raw_S | (rows.temperature_S <= 0.0), 1.0, rows.temperature_S)
        either_SV = jnp.where(is_raw_S[:, None], *logits)
        logprobs_SV = log_probs_of(either_SV, temperature_S, part=part, masses=masses).logprobs_SV
        own_S = log_prob_of(logprobs_SV, sampled.ids_S, part=part)
        ranks_S = ranks_of(logprobs_SV, sampled.ids_S, own_S, part=part)
        num_wanted = jnp.max(rows.num_top_S).astype(jnp.int32)
        top = likeliest(logprobs_SV, num_wanted=num_wanted, most_top=most_top, part=part)
        reported = sampled._replace(
            logprobs_S=jnp.where(is_raw_S, own_S, sampled.logprobs_S),
            ranks_S=jnp.where(is_raw_S, ranks_S, sampled.ranks_S),
            top=TopTokens(
                *(jnp.where(is_raw_S[:, None], one, other) for one, other in zip(top, sampled.top, strict=True))
            ),
        )
        listed_SL = log_probs_at(logprobs_SV, asked_SF[:, 1:], part=part)
        return reported, jnp.concatenate([entropy_of(logprobs_SV, part=part)[:, None], listed_SL], axis=1)

    # All devices are asked the same, and exchange numbers only then.
    nothing = sampled, jnp.zeros(asked_SF.shape, jnp.float32)
    return jax.lax.cond(jnp.any(asked_SF[:, 0] >= 0), found, lambda: nothing)


@jax.named_scope("evidence")
def sampling_support(
    logits_SV: jax.Array,
    ids_S: jax.Array,
    *,
    wants_S: jax.Array,
    rows: SamplingBatch,
    part: VocabularyPart,
    masses: Masses,
) -> tuple[jax.Array, jax.Array]:
    """The words that truncation has left to rows that want it, as bits int32 [S, W] of the whole vocabulary (those of
    `masks`), and the log-probs float32 [S] of the samples `ids_S` among these. The same on all devices.
    """
    num_words = mask_words(part.num_parts * part.width)

    def found() -> tuple[jax.Array, jax.Array]:
        is_greedy_S = rows.temperature_S <= 0.0
        temperature_S = jnp.where(is_greedy_S, 1.0, rows.temperature_S)
        logprobs_SV = log_probs_of(logits_SV, temperature_S, part=part, masses=masses).logprobs_SV
        limits = {"top_k_S": rows.top_k_S, "top_p_S": rows.top_p_S, "min_p_S": rows.min_p_S}
        kept_SV = is_kept(logprobs_SV, last_kept(logprobs_SV, part=part, **limits), part=part)
        kept_SV = jnp.where(is_greedy_S[:, None], part.ids() == ids_S[:, None], kept_SV & (jnp.exp(logprobs_SV) > 0))
        kept_SV &= part.ids() < part.num_words
        mass_S = part.sum(jnp.sum(jnp.exp(logprobs_SV), axis=-1, where=kept_SV))
        own_S = log_prob_of(logprobs_SV, ids_S, part=part) - jnp.log(mass_S)
        of_all = jnp.zeros((len(ids_S), num_words * WORD_BITS), jnp.int32)
        of_all = jax.lax.dynamic_update_slice_in_dim(of_all, kept_SV.astype(jnp.int32), part.first, axis=1)
        bits_SW = (of_all.reshape(len(ids_S), num_words, WORD_BITS) << jnp.arange(WORD_BITS)).sum(-1, dtype=jnp.int32)
        return part.sum(bits_SW), own_S

    nothing = jnp.zeros((len(ids_S), num_words), jnp.int32), jnp.zeros(len(ids_S), jnp.float32)
    return jax.lax.cond(jnp.any(wants_S), found, lambda: nothing)
