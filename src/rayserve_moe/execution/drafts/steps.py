"""Device computation of a draft model: its features in every step, and on demand the drafts after the step.

Its pool has the pages of the target's pool, so a cached prefix of the target is cached here too. Scratch pages per row
follow, which hold the keys and values of drafts before a step verifies them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import likeliest_samples, sample
from rayserve_moe.execution.drafts.parts import draft_of, noise_for, scratch_pages, weights_of_both, with_scratch
from rayserve_moe.execution.step.inputs import DeviceInput, sampling_of
from rayserve_moe.execution.step.pytrees import DeviceState, DraftState, ModelWeights, TreeShape
from rayserve_moe.execution.step.samples import OwnSamples
from rayserve_moe.kernels.ancestors import places_of
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.draft_layer import DraftConfig, draft_features, draft_logits, target_features
from rayserve_moe.model.model_config import Pools
from rayserve_moe.model.states import page_size_of, pool_partitions
from rayserve_moe.model.transformer import ForwardOutput
from rayserve_moe.parallel.sharding import gather_rows

ROW_AXES: tuple[str | None, ...] = ("data_ranks", None)
ARRAY_AXES = (ROW_AXES, ROW_AXES[:1], ROW_AXES)
"""Logical axes of the arrays of a draft's state behind its pools, over all data ranks."""


def extended(
    weights: ModelWeights,
    state: DeviceState,
    *,
    step: DeviceInput,
    out: ForwardOutput,
    own: OwnSamples,
    config: DraftConfig,
) -> DraftState:
    """On one device: the draft's state after a step, of whose tokens each is followed by the next or what is sampled.

    What a prompt of which a single token is computed goes on with is not known here: its next is taken to be itself.
    Where several choices sample after one token, the first one's sample follows it for all of them, which costs the
    others right drafts at most.
    """
    batch, places_S = step.batch, step.sample_places_S
    both, draft = weights_of_both(weights), draft_of(state)
    num_rows, num_tokens = len(state.last_tokens_R), len(batch.token_ids_T)
    goes_on_T = jnp.roll(batch.positions_T, -1) == batch.positions_T + 1
    next_T = jnp.where(goes_on_T, jnp.roll(batch.token_ids_T, -1), batch.token_ids_T)
    is_fork_S = (places_S == jnp.roll(places_S, 1)) & (jnp.arange(len(places_S)) > 0)
    sampled_S = jnp.where((step.sample_rows_S < num_rows) & ~is_fork_S, places_S, num_tokens)
    next_T = next_T.at[sampled_S].set(own.ids_S, mode="drop")
    if batch.num_prefill_blocks:
        next_T = next_T.at[_known_ends(step)].set(step.block_nexts_B, mode="drop")
    features_TD = target_features(*both, out, config=config)
    of_next = replace(batch, token_ids_T=next_T)
    features_TD, pools = draft_features(both, draft.pools, of_next, features_TD, config=config)
    after = draft._replace(
        pools=pools,
        features_RD=draft.features_RD.at[own.rows_S].set(features_TD[places_S], mode="drop"),
        positions_R=draft.positions_R.at[own.rows_S].set(batch.positions_T[places_S], mode="drop"),
    )
    return after if own.moves is None else after.moved(own.moves, config.layer.kernels.pool.move_rows)


def _known_ends(step: DeviceInput) -> jax.Array:
    """Return the indices in T of the last tokens of blocks, [B]; T if the next token is not known."""
    batch, num_singles, num_tokens = step.batch, step.batch.num_singles, len(step.batch.token_ids_T)
    positions_BQ = batch.positions_T[num_singles:].reshape(batch.num_prefill_blocks, -1)
    block_tokens = positions_BQ.shape[1]
    counts_B = jnp.sum(positions_BQ >= 0, axis=1)
    ends_B = num_singles + jnp.arange(len(counts_B)) * block_tokens + counts_B - 1
    return jnp.where((counts_B > 0) & (step.block_nexts_B >= 0), ends_B, num_tokens)


def draft_ahead(
    weights: ModelWeights,
    state: DeviceState,
    *,
    rows_NS: jax.Array,
    config: DraftConfig,
    shape: TreeShape,
    partitions: tuple[ModelWeights, DeviceState],
) -> tuple[DeviceState, jax.Array]:
    """Return the state and the drafts after the last samples of rows.

    `rows_NS` int32 are rows of each data rank; rows that do not exist are padding. Weights and state are sharded by
    `partitions`.

    Returns: drafts int32 [N, S, K], or trees int32 [N, S, K, 2] in the form of `scheduling.draft_trees`.
    """
    plan, whole = config.layer.plan, PartitionSpec()

    def on_device(weights: ModelWeights, state: DeviceState, rows_NS: jax.Array) -> tuple[DeviceState, jax.Array]:
        if shape.num_children > 1:
            drafts_SK2, pools = grown_tree(weights, state, rows_S=rows_NS[plan.data_rank()], config=config, shape=shape)
            state = replace(state, draft=draft_of(state)._replace(pools=pools))
            return state, plan.gather_data_ranks(drafts_SK2[None], dim=0)
        drafts_KA, pools = _chain(weights, state, rows_NS[plan.data_rank()], config=config, num_drafts=shape.num_drafts)
        drafts_NSK = jnp.moveaxis(drafts_KA.reshape(shape.num_drafts, *rows_NS.shape), 0, -1)
        rank, draft = plan.data_rank(), draft_of(state)
        drafts_RK = draft.drafts_RK.at[rows_NS[rank]].set(drafts_NSK[rank], mode="drop")
        return replace(state, draft=draft._replace(pools=pools, drafts_RK=drafts_RK)), drafts_NSK

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(*partitions, whole),
        out_specs=(partitions[1], whole),
        check_vma=False,
    )(weights, state, rows_NS)


def _chain(
    weights: ModelWeights, state: DeviceState, rows_S: jax.Array, *, config: DraftConfig, num_drafts: int
) -> tuple[jax.Array, Pools]:
    """Return the drafts of all data ranks, int32 [K, A], and the pools; runs on one device."""
    plan, draft, both = config.layer.plan, draft_of(state), weights_of_both(weights)
    num_rows, page_size = len(state.last_tokens_R), page_size_of(draft.pools)
    positions_S = jnp.where(rows_S < num_rows, draft.positions_R.at[rows_S].get(mode="clip"), -1)
    table_SP = with_scratch(
        state, rows_S, positions_S=positions_S, num_scratch=scratch_pages(num_drafts - 1, page_size)
    )

    def drawn(features_SD: jax.Array, position_S: jax.Array) -> jax.Array:
        sampling, _ = sampling_of(state, rows_S, positions_S=position_S)
        sampling = gather_rows(replace(sampling, num_top_S=jnp.zeros_like(sampling.num_top_S)), plan)
        logits_AV = draft_logits(both, features_SD, config=config)
        noise, words = noise_for(weights, config)
        ids_A = sample(logits_AV, sampling, part=config.words, max_top=1, noise=noise).ids_S
        return ids_A if words is None else words[ids_A]

    def ahead(
        carry: tuple[jax.Array, Pools, jax.Array], step: jax.Array
    ) -> tuple[tuple[jax.Array, Pools, jax.Array], jax.Array]:
        features_SD, pools, ids_A = carry
        at_S = positions_S + 1 + step
        at_S = jnp.where((positions_S >= 0) & (at_S < table_SP.shape[1] * page_size), at_S, -1)
        pages_S = jnp.take_along_axis(table_SP, jnp.maximum(at_S, 0)[:, None] // page_size, axis=1)[:, 0]
        slots_S = jnp.where(at_S >= 0, pages_S * page_size + at_S % page_size, 0)
        own_ids_S = ids_A.reshape(plan.data_size, -1)[plan.data_rank()]
        batch = TokenBatch(own_ids_S, at_S, slots_S, table_SP, len(rows_S), rows_B=rows_S)
        features_SD, pools = draft_features(both, pools, batch, features_SD, config=config)
        ids_A = drawn(features_SD, positions_S + 3 + step)
        return (features_SD, pools, ids_A), ids_A

    features_SD = draft.features_RD.at[rows_S].get(mode="clip")
    first_A = drawn(features_SD, positions_S + 2)
    carry = features_SD, draft.pools, first_A
    (_, pools, _), others_KA = jax.lax.scan(ahead, carry, jnp.arange(num_drafts - 1))
    return jnp.concatenate([first_A[None], others_KA]), pools


def draft_partitions(config: DraftConfig) -> DraftState:
    """Return the tree of a draft's state with partitions for arrays."""
    of_rows = (cast(jax.Array, config.layer.plan.partition(axes)) for axes in ARRAY_AXES)
    return DraftState(pool_partitions(config.layer), *of_rows)


class Level(NamedTuple):
    """The nodes of a tree level that are extended by children."""

    ids_SC: jax.Array
    scores_SC: jax.Array
    places_SC: jax.Array
    """Index of each node among all found drafts."""
    ancestors_SC: jax.Array
    """Bit masks of ancestors among the nodes that the draft model has read."""
    features_SCD: jax.Array
    """Features of each node's parent."""


class Found(NamedTuple):
    """Found drafts of a tree, arrays [S, ...]."""

    ids: jax.Array
    scores: jax.Array
    parents: jax.Array
    """Index of each draft's parent among all found drafts, -1 for none."""


def grown_tree(
    weights: ModelWeights, state: DeviceState, *, rows_S: jax.Array, config: DraftConfig, shape: TreeShape
) -> tuple[jax.Array, Pools]:
    """Return the drafts of rows of a data rank, int32 [S, K, 2], and the draft model's pools; runs on one device."""
    draft, count, num_rows = draft_of(state), shape.num_children, len(rows_S)
    positions_S = jnp.where(rows_S < len(state.last_tokens_R), draft.positions_R.at[rows_S].get(mode="clip"), -1)
    num_scratch = scratch_pages((shape.num_levels - 1) * count, page_size_of(draft.pools))
    table_SP = with_scratch(state, rows_S, positions_S=positions_S, num_scratch=num_scratch)
    features_SD = draft.features_RD.at[rows_S].get(mode="clip")
    follow = partial(_children, weights, state, config=config, count=count)
    ids_SC, scores_SC = follow(features_SD, rows_S, positions_S + 2)
    nodes_C = jnp.arange(count, dtype=jnp.int32)
    sequences_X = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), count)
    features_SCD = jnp.broadcast_to(features_SD[:, None], (num_rows, count, features_SD.shape[1]))
    places_SC = jnp.broadcast_to(nodes_C, ids_SC.shape)
    first = Level(ids_SC, scores_SC, places_SC, jnp.zeros_like(ids_SC), features_SCD)

    def deeper(carry: tuple[Level, Pools], level: jax.Array) -> tuple[tuple[Level, Pools], Found]:
        nodes, pools = carry
        masks_SC = nodes.ancestors_SC | jnp.left_shift(jnp.int32(1), level * count + nodes_C)
        at_S1 = jnp.where(positions_S < 0, -1, positions_S + 1 + level)[:, None]
        at_SC = jnp.broadcast_to(at_S1, masks_SC.shape)
        batch = _batch(nodes.ids_SC, at_SC, masks_SC, table_SP, page_size_of(draft.pools))
        batch = replace(batch, rows_B=jnp.repeat(rows_S, count))
        if config.layer.kernels.attention.has_flat_rows:
            batch = replace(batch, sequences_U=sequences_X, most_together=count)
        given_XD = nodes.features_SCD.reshape(-1, nodes.features_SCD.shape[2])
        features_XD, pools = draft_features(weights_of_both(weights), pools, batch, given_XD, config=config)
        ids_XC, own_XC = follow(features_XD, jnp.repeat(rows_S, count), jnp.repeat(positions_S + 3 + level, count))
        ids_SN, own_SN = (each.reshape(num_rows, -1) for each in (ids_XC, own_XC))
        scores_SN = jnp.repeat(nodes.scores_SC, count, axis=1) + own_SN
        found = Found(ids_SN, scores_SN, jnp.repeat(nodes.places_SC, count, axis=1))
        read = masks_SC, features_XD.reshape(nodes.features_SCD.shape)
        return (_best_level(found, *read, first_place=count + level * count**2), pools), found

    levels_L = jnp.arange(shape.num_levels - 1, dtype=jnp.int32)
    (_, pools), found = jax.lax.scan(deeper, (first, draft.pools), levels_L)
    roots = Found(ids_SC, scores_SC, jnp.full_like(ids_SC, -1))
    of_all = (
        jnp.concatenate([one, jnp.moveaxis(others, 0, 1).reshape(num_rows, -1)], axis=1)
        for one, others in zip(roots, found, strict=True)
    )
    return _best_of(Found(*of_all), shape.num_drafts), pools


def _best_level(found: Found, masks_SC: jax.Array, features_SCD: jax.Array, *, first_place: jax.Array) -> Level:
    """Return the best found nodes as the next level; `masks_SC` and `features_SCD` belong to their parents."""
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
    """Return the `count` likeliest samples at `positions_X`, given features of rows of this data rank.

    Returns: token ids int32 [X, C] and log-probs [X, C], at most 0.
    """
    plan = config.layer.plan
    sampling, _ = sampling_of(state, rows_X, positions_S=positions_X)
    sampling = gather_rows(replace(sampling, num_top_S=jnp.full_like(sampling.num_top_S, count)), plan)
    logits_AV = draft_logits(weights_of_both(weights), features_XD, config=config)
    noise, words = noise_for(weights, config)
    masses = config.target.kernels.sampling.masses
    found = likeliest_samples(logits_AV, sampling, part=config.words, count=count, noise=noise, masses=masses)
    own_ids, own_scores = (of_all.reshape(plan.data_size, len(rows_X), -1)[plan.data_rank()] for of_all in found)
    return own_ids if words is None else words[own_ids], jnp.minimum(own_scores, 0.0)


def _batch(
    ids_SC: jax.Array, positions_SC: jax.Array, ancestors_SC: jax.Array, table_SP: jax.Array, page_size: int
) -> TokenBatch:
    """Return the nodes as a batch of single tokens; nodes without a slot in the page table become padding."""
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
    """Return the best `count` drafts, int32 [S, K, 2]: token, and index of its parent among them from 1 on (0: none).

    A parent has no lower score than its child and a smaller index in `found`, so it precedes the child in a tie too.
    """
    num_rows, num_found = found.ids.shape
    _, best_SK = jax.lax.top_k(found.scores, count)
    rows_S1 = jnp.arange(num_rows)[:, None]
    places_SN = jnp.zeros((num_rows, num_found + 1), jnp.int32).at[rows_S1, best_SK].set(jnp.arange(1, count + 1))
    parents_SK = jnp.take_along_axis(found.parents, best_SK, axis=1)
    follows_SK = jnp.take_along_axis(places_SN, jnp.where(parents_SK < 0, num_found, parents_SK), axis=1)
    return jnp.stack([jnp.take_along_axis(found.ids, best_SK, axis=1), follows_SK], axis=-1)
