"""Choosing the next token on the device: the samples, and which samples of drafted tokens count.

By the Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample of their softmax. The noise of a
token is a function of (seed, choice index, position) alone, from a counter-based generator (Threefry), and is added to
the log-probabilities that survive truncation. So it depends on no other row of the batch.

A sequence whose drafts are verified has several samples next to each other: after its last token, then after each
draft, as if all drafts before it were its own tokens. Samples count up to the first draft that differs from the sample
before it. As noise depends on the position alone, these are the samples of the sequence without drafts.
"""

# S sampled rows   V vocabulary (local share)   P parts   J likeliest tokens   K most drafts of a row

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.log_probs import LogProbs, Masses, TopTokens, likeliest, log_probs_of, ranks_of
from rayserve_moe.decoding.truncation import LastKept, Limits, are_limited, is_kept, keep_all, last_kept
from rayserve_moe.kernels.reference.layers import best_of, gumbel_noise, masses_of
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

Noise = Callable[..., jax.Array]
"""`layers.gumbel_noise`, or a kernel in its place."""
Choose = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""A kernel that finds the best of what is kept with its noise, instead of noise: `cpu_native.calls.choose`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Parameters per sampled row: float32 [S] and uint32 [S]; `position_S` is where the new token will stand.

    `num_top_S` is how many of the likeliest tokens are wanted.
    """

    temperature_S: jax.Array
    limits: Limits
    seed_S: jax.Array
    choice_S: jax.Array
    position_S: jax.Array
    num_top_S: jax.Array


class Sampled(NamedTuple):
    """What `sample` returns, per row."""

    ids_S: jax.Array
    logprobs_S: jax.Array
    finite_S: jax.Array
    top: TopTokens
    ranks_S: jax.Array


class _Drawn(NamedTuple):
    """Tokens with their log-probabilities, and their places among all."""

    ids_S: jax.Array
    logprobs_S: jax.Array
    ranks_S: jax.Array


@jax.named_scope("sampling")
def sample(  # noqa: PLR0913 (the kernels are by keyword)
    logits_SV: jax.Array,
    rows: SamplingBatch,
    *,
    part: VocabularyPart,
    max_top: int,
    noise: Noise = gumbel_noise,
    masses: Masses = masses_of,
    choose: Choose | None = None,
) -> Sampled:
    """Sample one token per row from float32 logits of the words of each device; the same on all devices.

    Temperature 0 is greedy (ties to the smaller id). Truncation order: top-k, then top-p of what is left, then min-p
    against the likeliest token (`last_kept`). Returns token ids int32 [S], their log-probabilities under
    log_softmax(logits / temperature) before truncation (temperature 0 counts as 1), and whether the row's logits
    were all finite; ids and log-probabilities of rows that were not are meaningless. With them come the likeliest
    tokens of the same distribution, of all rows as many as any row wants, up to `max_top`, and int32 ranks.
    """
    greedy_S = rows.temperature_S <= 0.0
    found = log_probs_of(logits_SV, jnp.where(greedy_S, 1.0, rows.temperature_S), part=part, masses=masses)
    best = _Drawn(found.best_S, found.largest_S, jnp.ones_like(found.best_S))
    best_here = partial(_best_here, found.logprobs_SV, rows, noise, part)
    if choose is not None:
        best_here = partial(_chosen_here, found, rows, choose, part)
    draw = partial(_draw, found.logprobs_SV, best_here, part)
    drawn = jax.lax.cond(jnp.all(greedy_S), lambda: best, draw)
    chosen = _Drawn(*(jnp.where(greedy_S, one, other) for one, other in zip(best, drawn, strict=True)))
    num_wanted = jnp.max(rows.num_top_S).astype(jnp.int32)
    top = likeliest(found.logprobs_SV, num_wanted=num_wanted, max_top=max_top, part=part)
    return Sampled(chosen.ids_S, chosen.logprobs_S, found.finite_S, top, chosen.ranks_S)


def _draw(
    logprobs_SV: jax.Array, best_here: Callable[[], tuple[jax.Array, jax.Array, jax.Array]], part: VocabularyPart
) -> _Drawn:
    score_PS, id_PS, own_PS = part.gather(*best_here())
    _, id_S = best_of(score_PS.T, id_PS.T)
    own_S = jnp.sum(own_PS, axis=0, where=id_PS == id_S)
    id_S = jnp.minimum(id_S, part.num_words - 1)
    return _Drawn(id_S, own_S, ranks_of(logprobs_SV, id_S, own_S, part=part))


def _best_here(
    logprobs_SV: jax.Array, rows: SamplingBatch, noise: Noise, part: VocabularyPart
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a device's word that scores best with its noise: score, id, log-probability."""
    score_S, id_S = best_of(_noisy(logprobs_SV, rows, noise, part), part.ids())
    return score_S, id_S, jnp.sum(logprobs_SV, axis=-1, where=part.ids() == id_S[:, None])


def _chosen_here(
    found: LogProbs, rows: SamplingBatch, choose: Choose, part: VocabularyPart
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the same by one kernel."""
    last = _last_kept(found.logprobs_SV, rows, part)
    of_noise = rows.seed_S, rows.choice_S, rows.position_S
    num_places = part.num_parts * part.width
    return choose(found.logprobs_SV, found.largest_S, of_noise, last, first=part.first, num_places=num_places)


def _noisy(logprobs_SV: jax.Array, rows: SamplingBatch, noise: Noise, part: VocabularyPart) -> jax.Array:
    """Return the log-probabilities that survive truncation, minus infinity for others, with noise."""
    last = _last_kept(logprobs_SV, rows, part)
    kept_SV = jnp.where(is_kept(logprobs_SV, last, part=part), logprobs_SV, -jnp.inf)
    return kept_SV + noise(rows.seed_S, rows.choice_S, rows.position_S, first=part.first, size=part.width)


def _last_kept(logprobs_SV: jax.Array, rows: SamplingBatch, part: VocabularyPart) -> LastKept:
    find = partial(last_kept, logprobs_SV, rows.limits, part=part)
    return jax.lax.cond(jnp.any(are_limited(rows.limits)), find, partial(keep_all, len(logprobs_SV)))


class Drafts(NamedTuple):
    """The token that each sample is taken after, int32 [S], and whether that is a draft, bool [S].

    `drafted_SK` int32 are the drafts among its tokens, the last one first; -1: none.
    """

    ids_S: jax.Array
    is_draft_S: jax.Array
    drafted_SK: jax.Array


def drafts_of(rows_S: jax.Array, positions_S: jax.Array, ids_S: jax.Array, *, max_drafts: int) -> Drafts:
    """Find the drafts among the tokens `ids_S` that samples are taken after.

    A token is a draft where the sample before it is of the same row and of the position before.
    """
    follows_S = (rows_S == jnp.roll(rows_S, 1)) & (positions_S == jnp.roll(positions_S, 1) + 1)
    is_draft_S = follows_S & (jnp.arange(len(rows_S)) > 0)
    drafted, reaches_S = [], is_draft_S
    for back in range(max_drafts):
        drafted.append(jnp.where(reaches_S, jnp.roll(ids_S, back), -1))
        reaches_S &= jnp.roll(is_draft_S, back + 1)
    return Drafts(ids_S, is_draft_S, jnp.stack(drafted, axis=1))


def accepted(sampled_S: jax.Array, drafts: Drafts) -> tuple[jax.Array, jax.Array]:
    """Return the samples that count, and the last one of each row that does; both bool [S]."""
    is_right_S = drafts.ids_S == jnp.roll(sampled_S, 1)
    counts_S = jnp.ones_like(is_right_S)
    for _ in range(drafts.drafted_SK.shape[1]):
        counts_S = ~drafts.is_draft_S | (is_right_S & jnp.roll(counts_S, 1))
    goes_on_S = jnp.roll(drafts.is_draft_S & counts_S, -1)
    return counts_S, counts_S & ~goes_on_S
