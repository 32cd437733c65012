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
from rayserve_moe.requests.columns import WANTS_MASK


class TokenColumns(NamedTuple):
    """What one row of logits says of a token, of the likeliest tokens and of listed ids, per row."""

    logprobs_S: jax.Array
    ranks_S: jax.Array
    top: TopTokens
    entropy_S: jax.Array
    listed_SL: jax.Array


def token_columns(  # noqa: PLR0913 (by keyword)
    logits_SV: jax.Array,
    temperature_S: jax.Array,
    *,
    ids_S: jax.Array,
    listed_SL: jax.Array,
    num_wanted: jax.Array,
    max_top: int,
    part: VocabularyPart,
    masses: Masses,
) -> TokenColumns:
    """Compute all that is reported of log_softmax(logits / temperature), the same on all devices.

    `ids_S` int32 are the tokens with log-probs and ranks, `listed_SL` int32 the listed ids, -1 for none. Of `max_top`
    likeliest tokens the first `num_wanted` are found.
    """
    logprobs_SV = log_probs_of(logits_SV, temperature_S, part=part, masses=masses).logprobs_SV
    own_S = log_prob_of(logprobs_SV, ids_S, part=part)
    return TokenColumns(
        logprobs_S=own_S,
        ranks_S=ranks_of(logprobs_SV, ids_S, own_S, part=part),
        top=likeliest(logprobs_SV, num_wanted=num_wanted, max_top=max_top, part=part),
        entropy_S=entropy_of(logprobs_SV, part=part),
        listed_SL=log_probs_at(logprobs_SV, listed_SL, part=part),
    )


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
) -> tuple[Sampled, dict[str, jax.Array]]:
    """Return the samples and the columns of evidence: `entropy` float32 [S] and `listed_logprobs` [S, L].

    `asked_SF` int32 [S, F] has per row what its evidence is of, then ids, -1 for none (`columns.evidence_row`). 0
    stands for the distribution that was sampled before truncation; 1 for the model's own, at temperature 1, which the
    sample's log-prob, its rank and the likeliest tokens are then of as well; -1 asks for nothing.
    """

    def found() -> tuple[Sampled, dict[str, jax.Array]]:
        is_raw_S = (asked_SF[:, 0] == 1) | (asked_SF[:, 0] == 1 + WANTS_MASK)
        of_logits = token_columns(
            jnp.where(is_raw_S[:, None], *logits),
            jnp.where(is_raw_S | (rows.temperature_S <= 0.0), 1.0, rows.temperature_S),
            ids_S=sampled.ids_S,
            listed_SL=asked_SF[:, 1:],
            num_wanted=jnp.max(rows.num_top_S).astype(jnp.int32),
            max_top=sampled.top.ids_SJ.shape[1],
            part=part,
            masses=masses,
        )
        reported = sampled._replace(
            logprobs_S=jnp.where(is_raw_S, of_logits.logprobs_S, sampled.logprobs_S),
            ranks_S=jnp.where(is_raw_S, of_logits.ranks_S, sampled.ranks_S),
            top=TopTokens(
                *(
                    jnp.where(is_raw_S[:, None], one, other)
                    for one, other in zip(of_logits.top, sampled.top, strict=True)
                )
            ),
        )
        return reported, {
            "entropy": of_logits.entropy_S,
            "listed_logprobs": of_logits.listed_SL,
        }

    # All devices are asked the same, and exchange numbers only then.
    _, columns = jax.eval_shape(found)
    zeros = {name: jnp.zeros(column.shape, column.dtype) for name, column in columns.items()}
    return jax.lax.cond(jnp.any(asked_SF[:, 0] >= 0), found, lambda: (sampled, zeros))


@jax.named_scope("evidence")
def sampling_mask(
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
        kept_SV = is_kept(logprobs_SV, last_kept(logprobs_SV, rows.limits, part=part), part=part)
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
