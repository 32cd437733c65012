"""Two logit processors, for `logit_processors: examples/logit_processors.py` in a server's settings.

    curl localhost:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "37+45=", "max_tokens": 8, "vllm_xargs": {"top_n_sigma": 1.0, "no_repeat_ngram": 3}}'

A request that names an argument of one is processed by it; docs/logit_processors.md says what a processor is given.
"""

# S sampled rows   V vocabulary (local share)   K last tokens of a row   P parts of the vocabulary

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.logit_processors import LogitProcessor, ProcessedRows
from rayserve_moe.parallel.vocabulary_part import VocabularyPart


def top_n_sigma(logits_SV: jax.Array, rows: ProcessedRows, *, part: VocabularyPart) -> jax.Array:
    """Keep the words within `top_n_sigma` standard deviations of the best one, over all words that may be sampled."""
    is_word_SV = (logits_SV > jnp.finfo(logits_SV.dtype).min / 2) & (part.ids() < part.num_words)
    count_S = part.sum(jnp.sum(is_word_SV, axis=1, dtype=jnp.float32))
    mean_S = part.sum(jnp.sum(logits_SV, axis=1, where=is_word_SV)) / count_S
    square_SV = jnp.square(logits_SV - mean_S[:, None])
    sigma_S = jnp.sqrt(part.sum(jnp.sum(square_SV, axis=1, where=is_word_SV)) / count_S)
    (best_PS,) = part.gather(logits_SV.max(axis=1))
    least_S = best_PS.max(axis=0) - rows.arguments["top_n_sigma"] * sigma_S
    return jnp.where(logits_SV >= least_S[:, None], logits_SV, -jnp.inf)


def no_repeat_ngram(logits_SV: jax.Array, rows: ProcessedRows, *, part: VocabularyPart) -> jax.Array:
    """Leave out words with which the last `no_repeat_ngram` tokens would be some that a row's last 64 tokens have."""
    recent_SK, size_S = rows.recent_SK, rows.arguments["no_repeat_ngram"]
    num_tokens = recent_SK.shape[1]
    places = jnp.arange(num_tokens)
    source_KK = places - (num_tokens - places)[:, None]  # row e: the tokens before place e, where the last ones stand
    before_SKK = jnp.where(source_KK >= 0, recent_SK[:, jnp.maximum(source_KK, 0)], -1)
    is_compared_SK = places > num_tokens - size_S[:, None]
    is_same_SKK = (before_SKK == recent_SK[:, None]) & (before_SKK >= 0)
    repeats_SK = jnp.all(is_same_SKK | ~is_compared_SK[:, None], axis=2) & (recent_SK >= 0) & (size_S > 0)[:, None]
    places_SK = jnp.where(repeats_SK, part.places(recent_SK), part.width)
    return logits_SV.at[jnp.arange(len(recent_SK))[:, None], places_SK].set(-jnp.inf, mode="drop")


LOGIT_PROCESSORS = [
    LogitProcessor(top_n_sigma, {"top_n_sigma": 1.0}),
    LogitProcessor(no_repeat_ngram, {"no_repeat_ngram": 0}),
]
