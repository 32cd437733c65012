"""Choosing the next token on the device.

By the Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample of their softmax. The noise of a
token is a function of (seed, choice index, position) alone, from a counter-based generator (Threefry), and is added to
the log-probabilities that survive truncation. So it depends on no other row of the batch.
"""

# S sampled rows   V vocabulary   J likeliest tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.truncation import is_kept, keep_all, last_kept
from rayserve_moe.kernels.layers import gumbel_noise

Noise = Callable[..., jax.Array]
"""`layers.gumbel_noise`, or a kernel in its place."""
LOWEST_LOGPROB = -9999.0
"""Reported for tokens that are less likely still, or cannot be sampled at all."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Parameters per sampled row: float32 [S] and uint32 [S]; `position_S` is where the new token will stand.

    `num_top_S` is how many of the likeliest tokens are wanted.
    """

    temperature_S: jax.Array
    top_p_S: jax.Array
    min_p_S: jax.Array
    top_k_S: jax.Array
    seed_S: jax.Array
    choice_S: jax.Array
    position_S: jax.Array
    num_top_S: jax.Array


class TopTokens(NamedTuple):
    """The J likeliest tokens, falling, ties to the smaller id: ids int32 [..., J], log-probabilities float32."""

    ids_SJ: jax.Array
    logprobs_SJ: jax.Array


class Sampled(NamedTuple):
    """What `sample` returns, per row."""

    ids_S: jax.Array
    logprobs_S: jax.Array
    finite_S: jax.Array
    top: TopTokens
    ranks_S: jax.Array


@jax.named_scope("sampling")
def sample(logits_SV: jax.Array, rows: SamplingBatch, *, most_top: int, noise: Noise = gumbel_noise) -> Sampled:
    """Sample one token per row from float32 logits.

    Temperature 0 is greedy (ties to the smaller id). Truncation order: top-k, then top-p of what is left, then min-p
    against the likeliest token (`last_kept`). Returns token ids int32 [S], their log-probabilities under
    log_softmax(logits / temperature) before truncation (temperature 0 counts as 1), and whether the row's logits
    were all finite; ids and log-probabilities of rows that were not are meaningless. With them come the likeliest
    tokens of the same distribution, of all rows as many as any row wants, up to `most_top`, and int32 ranks.
    """
    finite_S = jnp.all(jnp.isfinite(logits_SV), axis=-1)
    greedy_S = rows.temperature_S <= 0.0
    # Relative to the best logit, no temperature is small enough to overflow what comes out.
    relative_SV = logits_SV - logits_SV.max(axis=-1, keepdims=True)
    scaled_SV = relative_SV / jnp.where(greedy_S, 1.0, rows.temperature_S)[:, None]
    with jax.named_scope("log_probs"):
        logprobs_SV = jax.nn.log_softmax(scaled_SV, axis=-1)
    best_S = _place_of_largest(logits_SV)
    drawn_S = jax.lax.cond(jnp.all(greedy_S), lambda: best_S, lambda: _draw(logprobs_SV, rows, noise))
    ids_S = jnp.where(greedy_S, best_S, drawn_S)
    top = likeliest(logprobs_SV, num_wanted=jnp.max(rows.num_top_S).astype(jnp.int32), most_top=most_top)
    first_S = jnp.ones_like(ids_S)
    ranks_S = jax.lax.cond(jnp.all(greedy_S), lambda: first_S, lambda: ranks_of(logprobs_SV, ids_S))
    ranks_S = jnp.where(greedy_S, first_S, ranks_S)
    return Sampled(ids_S, jnp.take_along_axis(logprobs_SV, ids_S[:, None], axis=-1)[:, 0], finite_S, top, ranks_S)


@jax.named_scope("log_probs")
def ranks_of(logprobs_SV: jax.Array, ids_S: jax.Array) -> jax.Array:
    """Place of a token among all in falling order, ties to the smaller id, int32 [S]; the likeliest has 1."""
    ids_V = jnp.arange(logprobs_SV.shape[1], dtype=jnp.int32)
    own_S1 = jnp.take_along_axis(logprobs_SV, ids_S[:, None], axis=-1)
    comes_before_SV = (logprobs_SV > own_S1) | ((logprobs_SV == own_S1) & (ids_V < ids_S[:, None]))
    return 1 + jnp.sum(comes_before_SV, axis=-1, dtype=jnp.int32)


@jax.named_scope("log_probs")
def likeliest(logprobs_SV: jax.Array, *, num_wanted: jax.Array, most_top: int) -> TopTokens:
    """The `num_wanted` likeliest tokens of each row in `most_top` places, or as many as there are words; then zeros.

    Log-probabilities are reported as LOWEST_LOGPROB at least.

    Each is the best of those that come after the one before, in falling order with ties to the smaller id: unlike a
    sort, that takes no time where nothing is wanted, and little to compile.
    """
    num_rows, vocab_size = logprobs_SV.shape
    count, ids_V = min(most_top, vocab_size), jnp.arange(vocab_size, dtype=jnp.int32)
    lowest = jnp.finfo(logprobs_SV.dtype).min

    def find(turn: jax.Array, before: tuple[TopTokens, jax.Array, jax.Array]) -> tuple[TopTokens, jax.Array, jax.Array]:
        top, id_S1, value_S1 = before
        values_SV = jnp.maximum(logprobs_SV, lowest)
        comes_after_SV = (values_SV < value_S1) | ((values_SV == value_S1) & (ids_V > id_S1))
        id_S1 = jnp.argmax(jnp.where(comes_after_SV, values_SV, -jnp.inf), axis=-1, keepdims=True).astype(jnp.int32)
        own_S1 = jnp.take_along_axis(logprobs_SV, id_S1, axis=-1)
        reported_S = jnp.maximum(own_S1[:, 0], LOWEST_LOGPROB)
        top = TopTokens(top.ids_SJ.at[:, turn].set(id_S1[:, 0]), top.logprobs_SJ.at[:, turn].set(reported_S))
        return top, id_S1, jnp.maximum(own_S1, lowest)

    empty = TopTokens(jnp.zeros((num_rows, count), jnp.int32), jnp.zeros((num_rows, count), logprobs_SV.dtype))
    first = (empty, jnp.full((num_rows, 1), -1, jnp.int32), jnp.full((num_rows, 1), jnp.inf, logprobs_SV.dtype))
    return jax.lax.fori_loop(0, jnp.minimum(num_wanted, count), find, first)[0]


def _draw(logprobs_SV: jax.Array, rows: SamplingBatch, noise: Noise) -> jax.Array:
    truncates = jnp.any((rows.top_k_S > 0) | (rows.top_p_S < 1.0) | (rows.min_p_S > 0.0))
    find = partial(last_kept, logprobs_SV, top_k_S=rows.top_k_S, top_p_S=rows.top_p_S, min_p_S=rows.min_p_S)
    last = jax.lax.cond(truncates, find, partial(keep_all, len(logprobs_SV)))
    kept_SV = jnp.where(is_kept(logprobs_SV, last), logprobs_SV, -jnp.inf)
    noise_SV = noise(rows.seed_S, rows.choice_S, rows.position_S, size=logprobs_SV.shape[1])
    return _place_of_largest(kept_SV + noise_SV)


def _place_of_largest(values_SV: jax.Array) -> jax.Array:
    """`argmax` of each row, int32 [S], ties to the smaller id; of rows with NaN the last id.

    XLA:CPU takes ten times as long for a reduction of pairs as for these two of numbers.
    """
    ids_V, last = jnp.arange(values_SV.shape[1], dtype=jnp.int32), values_SV.shape[1] - 1
    is_largest_SV = values_SV == values_SV.max(axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest_SV, ids_V, last), axis=-1)
