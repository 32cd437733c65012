"""Groups of single tokens: those of one sequence in a step, which follow each other and attend its pages at once.

The tokens of a group, a chain of drafts or nodes of one tree, have keys at places that follow each other. So positions,
ancestors and the sequence that each token belongs to say which groups there are.
"""

# U single tokens   G groups, and as many more as there are cores   X the same and one more

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.ancestors import depths_of, places_of
from rayserve_moe.kernels.reference.attention import ScoreConfig

NEVER = np.iinfo(np.int32).max


class GroupVisits(NamedTuple):
    """Groups that begin in a part of the single tokens, int32, the real ones first: each sees keys from `first_G` to
    ahead of `end_G`, and has `counts_G` tokens from `starts_G` on, whose trees begin at `roots_G` and whose page ids
    are in row `tables_G` of the part's.

    `is_own_U` says which tokens belong to one; `filled_X` are the groups that there are, in order, and beyond them what
    is no group's number.
    """

    first_G: jax.Array
    end_G: jax.Array
    filled_X: jax.Array
    roots_G: jax.Array
    tables_G: jax.Array
    starts_G: jax.Array
    counts_G: jax.Array
    is_own_U: jax.Array

    @property
    def num_groups(self) -> jax.Array:
        """How many groups there are."""
        return jnp.sum(self.counts_G > 0, dtype=jnp.int32)


def groups_of(
    positions_U: jax.Array,
    sequences_U: jax.Array,
    ancestors_U: jax.Array | None,
    config: ScoreConfig,
    *,
    part: slice,
    num_cores: int,
) -> GroupVisits:
    """The groups that begin in a `part` of the single tokens; tokens of one sequence stand side by side."""
    num_tokens, num_groups = len(positions_U), part.stop - part.start + num_cores
    bits_U = jnp.ones_like(positions_U) if ancestors_U is None else ancestors_U
    ends_U = (positions_U if ancestors_U is None else places_of(positions_U, bits_U)) + 1
    first_U = config.first_key(positions_U)
    first_U = jnp.zeros_like(positions_U) if first_U is None else first_U
    roots_U = positions_U - depths_of(bits_U)
    numbers_U, is_real_U = np.arange(num_tokens, dtype=np.int32), positions_U >= 0
    goes_on_U = is_real_U & jnp.roll(is_real_U, 1) & (sequences_U == jnp.roll(sequences_U, 1)) & (numbers_U > 0)
    begins_U = is_real_U & ~goes_on_U
    in_part_U = begins_U & (numbers_U >= part.start) & (numbers_U < part.stop)
    group_U = jnp.cumsum(begins_U) - 1 - jnp.sum(begins_U & (numbers_U < part.start))
    own_GU = (group_U == np.arange(num_groups)[:, None]) & (group_U < jnp.sum(in_part_U)) & is_real_U

    def least(of_U: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(own_GU, of_U, NEVER), axis=1)

    counts_G = jnp.sum(own_GU, axis=1, dtype=jnp.int32)
    first_G, roots_G, starts_G = (
        jnp.where(counts_G > 0, least(of_U), 0) for of_U in (first_U, roots_U, jnp.asarray(numbers_U))
    )
    if ancestors_U is not None:
        first_G = jnp.minimum(first_G, roots_G)
    end_G = jnp.max(jnp.where(own_GU, ends_U, 0), axis=1)
    order_X = np.arange(num_groups + 1, dtype=np.int32)
    filled_X = jnp.where(order_X < jnp.sum(counts_G > 0), order_X, NEVER)
    tables_G = jnp.maximum(starts_G - part.start, 0)
    return GroupVisits(first_G, end_G, filled_X, roots_G, tables_G, starts_G, counts_G, own_GU.any(axis=0))
