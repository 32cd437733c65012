"""Drafting a tree: which tokens are likeliest to be sampled after each other, by draft model and the target's noise.

As EAGLE-2 (arXiv:2406.16858) grows it: on each level the best nodes have children, and of all that were found the best
are verified, best by the product of what the draft model gives each node on the path. That is the softmax of its logits
by the temperature plus the noise that the target will draw with, so that a token which only the noise lifts counts as
it should.
"""

# S rows of a data rank   A rows of all data ranks   C children, and nodes of a level that have any   X = S * C
# L levels of nodes that have children   N drafts found   K drafts kept   D model width   P page-table width

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.sampling import likeliest_samples
from rayserve_moe.execution.draft_parts import draft_of, noise_for, scratch_pages, weights_of_both, with_scratch
from rayserve_moe.execution.step_input import sampling_of
from rayserve_moe.execution.step_types import DeviceState, ModelWeights, TreeShape
from rayserve_moe.kernels.ancestors import places_of
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.draft_layer import DraftConfig, draft_features, draft_logits
from rayserve_moe.parallel.sharding import gather_rows


class Level(NamedTuple):
    """The nodes of a level that have children: tokens, scores, places among all that were found, masks of ancestors
    among the nodes that the draft model has read, [S, C]; and features of what they follow [S, C, D]."""

    ids_SC: jax.Array
    scores_SC: jax.Array
    places_SC: jax.Array
    ancestors_SC: jax.Array
    features_SCD: jax.Array


class Found(NamedTuple):
    """Drafts, their scores, and the places of those that they follow among all, -1 for none; all [S, ...]."""

    ids: jax.Array
    scores: jax.Array
    parents: jax.Array


def grown_tree(
    weights: ModelWeights, state: DeviceState, *, rows_S: jax.Array, config: DraftConfig, shape: TreeShape
) -> tuple[jax.Array, jax.Array]:
    """On one device: the drafts of rows of a data rank, int32 [S, K, 2], and the draft model's pool."""
    draft, count, num_rows = draft_of(state), shape.num_children, len(rows_S)
    positions_S = jnp.where(rows_S < len(state.last_tokens_R), draft.positions_R.at[rows_S].get(mode="clip"), -1)
    num_scratch = scratch_pages((shape.num_levels - 1) * count, draft.kv_pages.shape[1])
    table_SP = with_scratch(state, rows_S, positions_S=positions_S, num_scratch=num_scratch)
    features_SD = draft.features_RD.at[rows_S].get(mode="clip")
    follow = partial(_children, weights, state, config=config, count=count)
    ids_SC, scores_SC = follow(features_SD, rows_S, positions_S + 2)
    nodes_C = jnp.arange(count, dtype=jnp.int32)
    sequences_X = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), count)
    features_SCD = jnp.broadcast_to(features_SD[:, None], (num_rows, count, features_SD.shape[1]))
    places_SC = jnp.broadcast_to(nodes_C, ids_SC.shape)
    first = Level(ids_SC, scores_SC, places_SC, jnp.zeros_like(ids_SC), features_SCD)

    def deeper(carry: tuple[Level, jax.Array], level: jax.Array) -> tuple[tuple[Level, jax.Array], Found]:
        nodes, pages = carry
        masks_SC = nodes.ancestors_SC | jnp.left_shift(jnp.int32(1), level * count + nodes_C)
        at_S1 = jnp.where(positions_S < 0, -1, positions_S + 1 + level)[:, None]
        at_SC = jnp.broadcast_to(at_S1, masks_SC.shape)
        batch = _batch(nodes.ids_SC, at_SC, masks_SC, table_SP, draft.kv_pages.shape[1])
        if config.layer.kernels.has_flat_rows:
            batch = replace(batch, sequences_U=sequences_X, most_together=count)
        given_XD = nodes.features_SCD.reshape(-1, nodes.features_SCD.shape[2])
        features_XD, pages = draft_features(weights_of_both(weights), pages, batch, given_XD, config=config)
        ids_XC, own_XC = follow(features_XD, jnp.repeat(rows_S, count), jnp.repeat(positions_S + 3 + level, count))
        ids_SN, own_SN = (each.reshape(num_rows, -1) for each in (ids_XC, own_XC))
        scores_SN = jnp.repeat(nodes.scores_SC, count, axis=1) + own_SN
        found = Found(ids_SN, scores_SN, jnp.repeat(nodes.places_SC, count, axis=1))
        read = masks_SC, features_XD.reshape(nodes.features_SCD.shape)
        return (_best_level(found, *read, first_place=count + level * count**2), pages), found

    levels_L = jnp.arange(shape.num_levels - 1, dtype=jnp.int32)
    (_, pages), found = jax.lax.scan(deeper, (first, draft.kv_pages), levels_L)
    roots = Found(ids_SC, scores_SC, jnp.full_like(ids_SC, -1))
    of_all = (
        jnp.concatenate([one, jnp.moveaxis(others, 0, 1).reshape(num_rows, -1)], axis=1)
        for one, others in zip(roots, found, strict=True)
    )
    return _best_of(Found(*of_all), shape.num_drafts), pages


def _best_level(found: Found, masks_SC: jax.Array, features_SCD: jax.Array, *, first_place: jax.Array) -> Level:
    """The nodes of a level that have children: the best that were found below nodes with such masks and features."""
    count = masks_SC.shape[1]
    scores_SC, best_SC = jax.lax.top_k(found.scores, count)
    above_SC = best_SC // count
    return Level(
        jnp.take_along_axis(found.ids, best_SC, axis=1),
        scores_SC,
        first_place + best_SC,
        jnp.take_along_axis(masks_SC, above_SC, axis=1),
        jnp.take_along_axis(features_SCD, above_SC[..., None], axis=1),
    )


def _children(  # noqa: PLR0913 (what is bound once comes first)
    weights: ModelWeights,
    state: DeviceState,
    features_XD: jax.Array,
    rows_X: jax.Array,
    positions_X: jax.Array,
    *,
    config: DraftConfig,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """Of rows of this data rank the `count` tokens that may stand at `positions_X` by a feature, [X, C] each: ids, and
    log-probabilities, which are 0 at most."""
    plan = config.layer.plan
    sampling, _ = sampling_of(state, rows_X, positions_S=positions_X)
    sampling = gather_rows(replace(sampling, num_top_S=jnp.full_like(sampling.num_top_S, count)), plan)
    logits_AV = draft_logits(weights_of_both(weights), features_XD, config=config)
    noise, words = noise_for(weights, config)
    masses = config.target.kernels.masses
    found = likeliest_samples(logits_AV, sampling, part=config.words, count=count, noise=noise, masses=masses)
    own_ids, own_scores = (of_all.reshape(plan.data_size, len(rows_X), -1)[plan.data_rank()] for of_all in found)
    return own_ids if words is None else words[own_ids], jnp.minimum(own_scores, 0.0)


def _batch(
    ids_SC: jax.Array, positions_SC: jax.Array, ancestors_SC: jax.Array, table_SP: jax.Array, page_size: int
) -> TokenBatch:
    """Nodes as single tokens, those without a place in the page table as padding."""
    places_SC = places_of(positions_SC, ancestors_SC)
    has_place_SC = (positions_SC >= 0) & (places_SC < table_SP.shape[1] * page_size)
    pages_SC = jnp.take_along_axis(table_SP, jnp.where(has_place_SC, places_SC, 0) // page_size, axis=1)
    slots_SC = jnp.where(has_place_SC, pages_SC * page_size + places_SC % page_size, 0)
    positions_X = jnp.where(has_place_SC, positions_SC, -1).reshape(-1)
    table_XP = jnp.repeat(table_SP, ids_SC.shape[1], axis=0)
    return TokenBatch(
        ids_SC.reshape(-1),
        positions_X,
        slots_SC.reshape(-1),
        table_XP,
        len(positions_X),
        ancestors_U=ancestors_SC.reshape(-1),
    )


def _best_of(found: Found, count: int) -> jax.Array:
    """The best drafts, int32 [S, K, 2]: tokens, and which of them each follows, from 1 on; 0: none.

    What a draft follows is no worse and stands ahead of it, so that it comes first among equals too.
    """
    num_rows, num_found = found.ids.shape
    _, best_SK = jax.lax.top_k(found.scores, count)
    rows_S1 = jnp.arange(num_rows)[:, None]
    places_SN = jnp.zeros((num_rows, num_found + 1), jnp.int32).at[rows_S1, best_SK].set(jnp.arange(1, count + 1))
    parents_SK = jnp.take_along_axis(found.parents, best_SK, axis=1)
    follows_SK = jnp.take_along_axis(places_SN, jnp.where(parents_SK < 0, num_found, parents_SK), axis=1)
    return jnp.stack([jnp.take_along_axis(found.ids, best_SK, axis=1), follows_SK], axis=-1)
