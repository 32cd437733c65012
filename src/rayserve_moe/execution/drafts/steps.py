"""Device computation of a draft model: its keys in every step, its features and drafts after a step on demand.

Its pool has the pages of the target's pool, so a cached prefix of the target is cached here too. Scratch pages per row
follow, which hold the keys and values of drafts before a step verifies them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import sample
from rayserve_moe.execution.drafts.parts import draft_of, noise_for, scratch_pages, weights_of_both, with_scratch
from rayserve_moe.execution.step.inputs import DeviceInput, num_columns, sampling_of
from rayserve_moe.execution.step.pytrees import DeviceState, DraftState, ModelWeights
from rayserve_moe.execution.step.samples import OwnSamples
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.draft_layer import DraftConfig, draft_features, draft_logits, target_features
from rayserve_moe.model.model_config import Pools
from rayserve_moe.model.states import page_size_of, pool_partitions
from rayserve_moe.model.transformer import ForwardOutput
from rayserve_moe.parallel.sharding import gather_rows

ROW_AXES: tuple[str | None, ...] = ("data_ranks", None)
ARRAY_AXES = (ROW_AXES, ROW_AXES[:1], ROW_AXES)
"""Logical axes of the row arrays of a draft's state, over all data ranks."""


def extended(  # noqa: PLR0913 (the parts of a step, by keyword)
    weights: ModelWeights,
    state: DeviceState,
    *,
    step: DeviceInput,
    out: ForwardOutput,
    own: OwnSamples,
    config: DraftConfig,
    rests: bool = False,
) -> DeviceState:
    """Return a device's state after a step, with the draft model's state updated.

    Each token is followed by the next token or its sample. The token after a prompt chunk of a single token is not
    known here, so the token itself takes its place. If several choices sample after the same token, the first sample
    follows it for all of them. Both only make some drafts wrong.

    If the draft `rests`, the pools have the step's keys and values, and its other arrays do not change. XLA removes
    the operations that only features need, and `TokenBatch.stores_only` is set for kernels that attend while they store
    keys.
    """
    batch, places_S = step.batch, step.sample_places_S
    both, draft = weights_of_both(weights), draft_of(state)
    num_rows, num_tokens = len(state.last_tokens_R), len(batch.token_ids_T)
    is_followed_T = jnp.roll(batch.positions_T, -1) == batch.positions_T + 1
    next_T = jnp.where(is_followed_T, jnp.roll(batch.token_ids_T, -1), batch.token_ids_T)
    is_fork_S = (places_S == jnp.roll(places_S, 1)) & (jnp.arange(len(places_S)) > 0)
    sampled_S = jnp.where((step.sample_rows_S < num_rows) & ~is_fork_S, places_S, num_tokens)
    next_T = next_T.at[sampled_S].set(own.ids_S, mode="drop")
    if batch.num_prefill_blocks:
        next_T = next_T.at[_known_ends(step)].set(step.block_nexts_B, mode="drop")
    features_TD = target_features(*both, out, config=config)
    of_next = replace(batch, token_ids_T=next_T, stores_only=rests)
    features_TD, pools = draft_features(both, draft.pools, of_next, features_TD, config=config)
    draft = draft._replace(pools=pools)
    if not rests:
        draft = draft._replace(
            features_RD=draft.features_RD.at[own.rows_S].set(features_TD[places_S], mode="drop"),
            positions_R=draft.positions_R.at[own.rows_S].set(batch.positions_T[places_S], mode="drop"),
        )
    return replace(state, draft=draft)


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
    num_drafts: int,
    partitions: tuple[ModelWeights, DeviceState],
) -> tuple[DeviceState, jax.Array]:
    """Return the state and the drafts after the last samples of rows, int32 [N, S, K].

    `rows_NS` int32 are rows of each data rank; rows that do not exist are padding. Weights and state are sharded by
    `partitions`.
    """
    plan, whole = config.layer.plan, PartitionSpec()

    def on_device(weights: ModelWeights, state: DeviceState, rows_NS: jax.Array) -> tuple[DeviceState, jax.Array]:
        drafts_KA, pools = _chain(weights, state, rows_NS[plan.data_rank()], config=config, num_drafts=num_drafts)
        drafts_NSK = jnp.moveaxis(drafts_KA.reshape(num_drafts, *rows_NS.shape), 0, -1)
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
        state,
        rows_S,
        positions_S=positions_S,
        num_scratch=scratch_pages(num_drafts - 1, page_size),
        num_columns=num_columns(config.target),
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
    """Return the tree of a draft's state with partitions in place of arrays."""
    of_rows = (cast(jax.Array, config.layer.plan.partition(axes)) for axes in ARRAY_AXES)
    return DraftState(pool_partitions(config.layer), *of_rows)
