"""Which samples of drafted tokens count: those up to the first draft that is not what was sampled before it.

A sequence whose drafts are verified has several samples next to each other: after its last token, then after each
draft, as if all drafts before it were its own tokens. The noise of a sample depends on its position alone, so what
counts is what the sequence would have sampled without drafts. Drafts are a chain, or a tree (`kernels.ancestors`), in
which the drafts before one are those on its path, and no two that follow the same token are equal.
"""

# S sampled rows   K most drafts of a row

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.ancestors import depths_of, nodes_of, parents_of


class Drafts(NamedTuple):
    """The token that each sample is taken after, int32 [S], and whether that is a draft, bool [S].

    `drafted_SK` int32 are the drafts among its tokens, the last one first; -1: none. Of trees, `before_S` int32 is the
    sample that each draft follows; of chains it is the one before.
    """

    ids_S: jax.Array
    is_draft_S: jax.Array
    drafted_SK: jax.Array
    before_S: jax.Array | None = None

    def at_parents(self, of_samples_S: jax.Array) -> jax.Array:
        """What the samples have that drafts follow."""
        return jnp.roll(of_samples_S, 1) if self.before_S is None else of_samples_S[self.before_S]


def drafts_of(rows_S: jax.Array, positions_S: jax.Array, ids_S: jax.Array, *, most_drafts: int) -> Drafts:
    """Find the drafts among the tokens `ids_S` that samples are taken after.

    A token is a draft where the sample before it is of the same row and of the position before.
    """
    follows_S = (rows_S == jnp.roll(rows_S, 1)) & (positions_S == jnp.roll(positions_S, 1) + 1)
    is_draft_S = follows_S & (jnp.arange(len(rows_S)) > 0)
    drafted, reaches_S = [], is_draft_S
    for back in range(most_drafts):
        drafted.append(jnp.where(reaches_S, jnp.roll(ids_S, back), -1))
        reaches_S &= jnp.roll(is_draft_S, back + 1)
    return Drafts(ids_S, is_draft_S, jnp.stack(drafted, axis=1))


def tree_drafts_of(ancestors_S: jax.Array, ids_S: jax.Array, *, most_drafts: int) -> Drafts:
    """The same of trees of at most `most_drafts` levels below their roots, by the masks of the tokens."""
    places_S, is_draft_S = jnp.arange(len(ids_S)), depths_of(ancestors_S) > 0
    before_S = jnp.where(is_draft_S, places_S - nodes_of(ancestors_S) + parents_of(ancestors_S), places_S)
    drafted, at_S, reaches_S = [], places_S, is_draft_S
    for _ in range(most_drafts):
        drafted.append(jnp.where(reaches_S, ids_S[at_S], -1))
        at_S = before_S[at_S]
        reaches_S &= is_draft_S[at_S]
    return Drafts(ids_S, is_draft_S, jnp.stack(drafted, axis=1), before_S)


def accepted(sampled_S: jax.Array, drafts: Drafts) -> tuple[jax.Array, jax.Array]:
    """Which samples count, and which are the last of their row that do; both bool [S]."""
    is_right_S = drafts.ids_S == drafts.at_parents(sampled_S)
    counts_S = jnp.ones_like(is_right_S)
    for _ in range(drafts.drafted_SK.shape[1]):
        counts_S = ~drafts.is_draft_S | (is_right_S & drafts.at_parents(counts_S))
    goes_on_S = drafts.is_draft_S & counts_S
    if drafts.before_S is None:
        goes_on_S = jnp.roll(goes_on_S, -1)
    else:
        goes_on_S = (
            jnp.zeros_like(goes_on_S).at[jnp.where(goes_on_S, drafts.before_S, len(goes_on_S))].set(True, mode="drop")
        )
    return counts_S, counts_S & ~goes_on_S
