"""Sampling of the next token on the device, and acceptance of draft tokens.

Samples are drawn by the Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample of their
softmax. The noise of a token is a function of seed, choice index and position, from a counter-based generator
(Threefry). It is added to the log-probabilities that survive truncation, so a sample does not depend on other rows of
the batch.

A sequence with drafts has several consecutive samples: after its last token, then after each draft, as if all drafts
before it were accepted. Samples count up to the first draft that differs from the sample before it. Since noise depends
on the position, these equal the samples of the sequence without drafts.
"""

# S sampled rows   V vocabulary (local share)   P parts   J likeliest tokens   K maximum number of drafts of a row

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
"""`layers.gumbel_noise`, or a kernel with the same interface."""
Choose = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""Kernel that returns the best kept token including its noise, in place of `Noise`: `cpu_native.calls.choose`."""
Truncate = Callable[..., tuple[jax.Array, jax.Array]]
"""Kernel in place of `last_kept` where the vocabulary is whole: `cpu_native.sampling_call.last_kept`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of each sampled row, [S]."""

    temperature_S: jax.Array
    """float32; 0 is greedy."""
    limits: Limits
    """Truncation limits."""
    seed_S: jax.Array
    """uint32."""
    choice_S: jax.Array
    """Choice index, uint32."""
    position_S: jax.Array
    """Position of the new token."""
    num_top_S: jax.Array
    """Number of most likely tokens to return."""


class Kept(NamedTuple):
    """Tokens that samples are drawn from, by row."""

    logprobs_SV: jax.Array
    """Log-probabilities of the local shard before truncation, float32."""
    last: LastKept
    """Last token that truncation keeps; meaningless for greedy rows."""


class Sampled(NamedTuple):
    """Result of `sample`, [S]."""

    ids_S: jax.Array
    """int32."""
    logprobs_S: jax.Array
    """Log-probability of each sample before truncation, float32."""
    finite_S: jax.Array
    """bool; False if a logit of the row is not finite. Ids and log-probabilities of such rows are meaningless."""
    top: TopTokens
    """Most likely tokens of the same distribution."""
    ranks_S: jax.Array
    """Rank of each sample, int32; 1 for the most likely token."""
    kept: Kept | None = None
    """Tokens that the samples are drawn from, if requested."""


class _Drawn(NamedTuple):
    """Drawn tokens with their log-probabilities and ranks."""

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
    truncate: Truncate | None = None,
    returns_kept: bool = False,
) -> Sampled:
    """Sample a token per row from each device's float32 logits; the result is the same on all devices.

    Temperature 0 is greedy, ties to the smaller id. Truncation applies top-k, then top-p to the remaining tokens, then
    min-p relative to the most likely token (`last_kept`). Log-probabilities are log_softmax(logits /
    temperature) before truncation, with temperature 1 for greedy rows. All rows get as many top tokens as the largest
    request, up to `max_top`.
    """
    greedy_S = rows.temperature_S <= 0.0
    found = log_probs_of(logits_SV, jnp.where(greedy_S, 1.0, rows.temperature_S), part=part, masses=masses)
    best = _Drawn(found.best_S, found.largest_S, jnp.ones_like(found.best_S))
    find_last, kept = partial(_last_kept, found.logprobs_SV, rows, truncate, part), None
    if returns_kept:
        last = find_last()
        find_last, kept = partial(LastKept, *last), Kept(found.logprobs_SV, last)
    best_here = partial(_best_here, found.logprobs_SV, find_last, rows, noise, part)
    if choose is not None:
        best_here = partial(_chosen_here, found, find_last, rows, choose, part)
    draw = partial(_draw, found.logprobs_SV, best_here, part)
    drawn = jax.lax.cond(jnp.all(greedy_S), lambda: best, draw)
    chosen = _Drawn(*(jnp.where(greedy_S, first, second) for first, second in zip(best, drawn, strict=True)))
    num_wanted = jnp.max(rows.num_top_S).astype(jnp.int32)
    top = likeliest(found.logprobs_SV, num_wanted=num_wanted, max_top=max_top, part=part)
    return Sampled(chosen.ids_S, chosen.logprobs_S, found.finite_S, top, chosen.ranks_S, kept)


def _draw(
    logprobs_SV: jax.Array, best_here: Callable[[], tuple[jax.Array, jax.Array, jax.Array]], part: VocabularyPart
) -> _Drawn:
    score_PS, id_PS, own_PS = part.gather(*best_here())
    _, id_S = best_of(score_PS.T, id_PS.T)
    own_S = jnp.sum(own_PS, axis=0, where=id_PS == id_S)
    id_S = jnp.minimum(id_S, part.num_words - 1)
    return _Drawn(id_S, own_S, ranks_of(logprobs_SV, id_S, own_S, part=part))


def _best_here(
    logprobs_SV: jax.Array, find_last: Callable[[], LastKept], rows: SamplingBatch, noise: Noise, part: VocabularyPart
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the token of the local shard with the highest score, noise included: score, id, log-probability."""
    score_S, id_S = best_of(_noisy(logprobs_SV, find_last, rows, noise, part), part.ids())
    return score_S, id_S, jnp.sum(logprobs_SV, axis=-1, where=part.ids() == id_S[:, None])


def _chosen_here(
    found: LogProbs, find_last: Callable[[], LastKept], rows: SamplingBatch, choose: Choose, part: VocabularyPart
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the same as `_best_here`, computed by a single kernel."""
    last = find_last()
    of_noise = rows.seed_S, rows.choice_S, rows.position_S
    num_places = part.num_parts * part.width
    return choose(found.logprobs_SV, found.largest_S, of_noise, last, first=part.first, num_places=num_places)


def _noisy(
    logprobs_SV: jax.Array, find_last: Callable[[], LastKept], rows: SamplingBatch, noise: Noise, part: VocabularyPart
) -> jax.Array:
    """Return the log-probabilities that survive truncation plus noise, minus infinity for the others."""
    last = find_last()
    kept_SV = jnp.where(is_kept(logprobs_SV, last, part=part), logprobs_SV, -jnp.inf)
    return kept_SV + noise(rows.seed_S, rows.choice_S, rows.position_S, first=part.first, size=part.width)


def _last_kept(
    logprobs_SV: jax.Array, rows: SamplingBatch, truncate: Truncate | None, part: VocabularyPart
) -> LastKept:
    def find() -> LastKept:
        if truncate is None or part.axes:
            return last_kept(logprobs_SV, rows.limits, part=part)
        return LastKept(*truncate(logprobs_SV, *rows.limits))

    return jax.lax.cond(jnp.any(are_limited(rows.limits)), find, partial(keep_all, len(logprobs_SV)))


class Drafts(NamedTuple):
    """The tokens that samples are taken after."""

    ids_S: jax.Array
    """int32."""
    is_draft_S: jax.Array
    """bool; True if the token is a draft."""
    drafted_SK: jax.Array
    """Drafts up to and including the token, latest first, int32; -1 for none."""


def drafts_of(rows_S: jax.Array, positions_S: jax.Array, ids_S: jax.Array, *, max_drafts: int) -> Drafts:
    """Find the drafts among the tokens `ids_S` that samples are taken after.

    A token is a draft if the previous sample is of the same row and of the position before.
    """
    follows_S = (rows_S == jnp.roll(rows_S, 1)) & (positions_S == jnp.roll(positions_S, 1) + 1)
    is_draft_S = follows_S & (jnp.arange(len(rows_S)) > 0)
    drafted, reaches_S = [], is_draft_S
    for back in range(max_drafts):
        drafted.append(jnp.where(reaches_S, jnp.roll(ids_S, back), -1))
        reaches_S &= jnp.roll(is_draft_S, back + 1)
    return Drafts(ids_S, is_draft_S, jnp.stack(drafted, axis=1))


def accepted(sampled_S: jax.Array, drafts: Drafts) -> tuple[jax.Array, jax.Array]:
    """Return the samples that count, and the last counted sample of each row; both bool [S]."""
    is_right_S = drafts.ids_S == jnp.roll(sampled_S, 1)
    counts_S = jnp.ones_like(is_right_S)
    for _ in range(drafts.drafted_SK.shape[1]):
        counts_S = ~drafts.is_draft_S | (is_right_S & jnp.roll(counts_S, 1))
    has_next_S = jnp.roll(drafts.is_draft_S & counts_S, -1)
    return counts_S, counts_S & ~has_next_S
