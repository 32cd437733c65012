"""What is reported of samples beside their own log-probabilities: those of listed ids, entropy, the model's own."""

# S sampled rows   V vocabulary (local share)   F what is asked of a sample: its distribution, then listed ids

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
from rayserve_moe.decoding.sampling import Sampled, SamplingBatch
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
    rank and the likeliest tokens are then as well; -1 asks for nothing.
    """
    most_top = sampled.top.ids_SJ.shape[1]

    def found() -> tuple[Sampled, jax.Array]:
        is_raw_S = asked_SF[:, 0] > 0
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
