"""Evidence of samples besides their log-probabilities: listed ids, entropy, raw log-probs and sampling masks."""

# S sampled rows   V vocabulary (local share)   W int32 numbers of a mask   F columns of a request

from __future__ import annotations

from collections.abc import Callable
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
from rayserve_moe.decoding.sampling import Kept, Sampled, SamplingBatch
from rayserve_moe.decoding.truncation import is_kept
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.requests.columns import WANTS_COLUMNS


class TokenColumns(NamedTuple):
    """Columns computed from each row of logits."""

    logprobs_S: jax.Array
    """Log-probability of the row's token, float32."""
    ranks_S: jax.Array
    """Rank of the row's token, int32; 1 for the most likely token."""
    top: TopTokens
    """Most likely tokens."""
    entropy_S: jax.Array
    """Entropy in nats, float32."""
    listed_SL: jax.Array
    """Log-probabilities of listed ids, float32."""


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
    """Compute all reported columns of log_softmax(logits / temperature), the same on all devices.

    `ids_S` int32 are the tokens whose log-probs and ranks are returned. `listed_SL` int32 are the listed ids, -1 for
    none. The first `num_wanted` of the `max_top` most likely tokens are computed.
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
    """Logits before and after the changes of sampling, float32 [S, V]."""

    raw_SV: jax.Array
    """The model's own logits."""
    processed_SV: jax.Array
    """Adjusted logits that samples are drawn from, before truncation."""


@jax.named_scope("evidence")
def with_evidence(
    sampled: Sampled,
    logits: EvidenceLogits,
    *,
    requested_SF: jax.Array,
    rows: SamplingBatch,
    part: VocabularyPart,
    masses: Masses,
) -> tuple[Sampled, dict[str, jax.Array]]:
    """Return the samples and the columns of evidence: `entropy` float32 [S] and `listed_logprobs` [S, L].

    `requested_SF` int32 [S, F] holds the flags of a row, then its listed ids, -1 for none (`columns.evidence_row`).
    Columns are of the sampled distribution before truncation, or of the model's own at temperature 1 if the lowest bit
    is set; the sample's log-prob, its rank and the most likely tokens then refer to it as well. -1 requests nothing.
    """
    requests_S = requested_SF[:, 0]
    wants_S = (requests_S >= 0) & (requests_S & WANTS_COLUMNS > 0)

    def found() -> tuple[Sampled, dict[str, jax.Array]]:
        is_raw_S = wants_S & (requests_S % 2 == 1)
        of_logits = token_columns(
            jnp.where(is_raw_S[:, None], *logits),
            jnp.where(is_raw_S | (rows.temperature_S <= 0.0), 1.0, rows.temperature_S),
            ids_S=sampled.ids_S,
            listed_SL=requested_SF[:, 1:],
            num_wanted=jnp.max(rows.num_top_S).astype(jnp.int32),
            max_top=sampled.top.ids_SJ.shape[1],
            part=part,
            masses=masses,
        )
        reported = sampled._replace(
            logprobs_S=jnp.where(is_raw_S, of_logits.logprobs_S, sampled.logprobs_S),
            ranks_S=jnp.where(is_raw_S, of_logits.ranks_S, sampled.ranks_S),
            top=TopTokens(
                *(jnp.where(is_raw_S[:, None], raw, own) for raw, own in zip(of_logits.top, sampled.top, strict=True))
            ),
        )
        return reported, {
            "entropy": of_logits.entropy_S,
            "listed_logprobs": of_logits.listed_SL,
        }

    # All devices see the same requests, so they take the same branch; only this branch has collectives.
    _, columns = jax.eval_shape(found)
    zeros = {name: jnp.zeros(column.shape, column.dtype) for name, column in columns.items()}
    return jax.lax.cond(jnp.any(wants_S), found, lambda: (sampled, zeros))


@jax.named_scope("evidence")
def sampling_mask(  # noqa: PLR0913 (the kernels are by keyword)
    kept: Kept,
    ids_S: jax.Array,
    *,
    wants_S: jax.Array,
    temperature_S: jax.Array,
    part: VocabularyPart,
    masses: Masses,
    kept_words: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the ids that truncation keeps, if a row wants them, and the log-probs of the samples among them.

    Ids are bits, int32 [S, W] over the whole vocabulary, as in `masks`. The log-probs float32 [S] of the samples
    `ids_S` are normalised over the kept ids. Both are the same on all devices. The kernel `kept_words` computes them
    where the vocabulary is whole.
    """
    num_words = mask_words(part.num_parts * part.width)

    def found() -> tuple[jax.Array, jax.Array]:
        logprobs_SV = kept.logprobs_SV
        if kept_words is not None and not part.axes:
            return kept_words(logprobs_SV, kept.last, ids_S, temperature_S=temperature_S, num_words=part.num_words)
        is_greedy_S1 = temperature_S[:, None] <= 0.0
        kept_SV = is_kept(logprobs_SV, kept.last, part=part) & (jnp.exp(logprobs_SV) > 0)
        kept_SV = jnp.where(is_greedy_S1, part.ids() == ids_S[:, None], kept_SV) & (part.ids() < part.num_words)
        # The kernel's sum does not depend on the number of rows.
        among_SV = jnp.where(kept_SV, logprobs_SV, jnp.finfo(logprobs_SV.dtype).min)
        among_SV = log_probs_of(among_SV, jnp.ones_like(temperature_S), part=part, masses=masses).logprobs_SV
        own_S = log_prob_of(among_SV, ids_S, part=part)
        of_all = jnp.zeros((len(ids_S), num_words * WORD_BITS), jnp.int32)
        of_all = jax.lax.dynamic_update_slice_in_dim(of_all, kept_SV.astype(jnp.int32), part.first, axis=1)
        bits_SW = (of_all.reshape(len(ids_S), num_words, WORD_BITS) << jnp.arange(WORD_BITS)).sum(-1, dtype=jnp.int32)
        return part.sum(bits_SW), own_S

    nothing = jnp.zeros((len(ids_S), num_words), jnp.int32), jnp.zeros(len(ids_S), jnp.float32)
    return jax.lax.cond(jnp.any(wants_S), found, lambda: nothing)
