"""What a draft model computes on the devices: beside every step its own features, and on demand the drafts after it.

Its pool has the pages of the target's, so that a prefix that is found there is found here; and behind them pages of
rows, in which drafts that no step has verified yet leave their keys and values.
"""

# R rows of a data rank   S rows that draft   T tokens   D model width   K drafts   P page-table width
# N data ranks   A rows of all data ranks   V words of the draft's head

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import sample
from rayserve_moe.execution.draft_parts import draft_of, noise_for, scratch_pages, weights_of_both, with_scratch
from rayserve_moe.execution.draft_trees import grown_tree
from rayserve_moe.execution.step_input import DeviceInput, sampling_of
from rayserve_moe.execution.step_samples import OwnSamples
from rayserve_moe.execution.step_types import DeviceState, DraftState, ModelWeights, TreeShape
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.draft_layer import DraftConfig, draft_features, draft_logits, target_features
from rayserve_moe.model.kv_cache import cache_row
from rayserve_moe.model.transformer import ForwardOutput
from rayserve_moe.parallel.sharding import gather_rows

ROW_AXES: tuple[str | None, ...] = ("data_ranks", None)


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
    features_TD, pages = draft_features(both, draft.kv_pages, of_next, features_TD, config=config)
    after = draft._replace(
        kv_pages=pages,
        features_RD=draft.features_RD.at[own.rows_S].set(features_TD[places_S], mode="drop"),
        positions_R=draft.positions_R.at[own.rows_S].set(batch.positions_T[places_S], mode="drop"),
    )
    return after if own.moves is None else after.moved(own.moves, config.layer.kernels.moves)


def _known_ends(step: DeviceInput) -> jax.Array:
    """Places in T of the last tokens of blocks, [B], beyond T where what follows is not known."""
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
    """The tokens, int32 [N, S, K], that may follow those which rows have sampled last; of a tree [N, S, K, 2], as
    `scheduling.draft_trees` has them. `rows_NS` int32 are rows of each data rank, those that do not exist are padding.
    Weights and state lie in `partitions`."""
    plan, whole = config.layer.plan, PartitionSpec()

    def on_device(weights: ModelWeights, state: DeviceState, rows_NS: jax.Array) -> tuple[DeviceState, jax.Array]:
        if shape.num_children > 1:
            drafts_SK2, pages = grown_tree(weights, state, rows_S=rows_NS[plan.data_rank()], config=config, shape=shape)
            state = replace(state, draft=draft_of(state)._replace(kv_pages=pages))
            return state, plan.gather_data_ranks(drafts_SK2[None], dim=0)
        drafts_KA, pages = _chain(
            weights, state, rows_NS[plan.data_rank()], config=config, most_drafts=shape.num_drafts
        )
        drafts_NSK = jnp.moveaxis(drafts_KA.reshape(shape.num_drafts, *rows_NS.shape), 0, -1)
        rank, draft = plan.data_rank(), draft_of(state)
        drafts_RK = draft.drafts_RK.at[rows_NS[rank]].set(drafts_NSK[rank], mode="drop")
        return replace(state, draft=draft._replace(kv_pages=pages, drafts_RK=drafts_RK)), drafts_NSK

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(*partitions, whole),
        out_specs=(partitions[1], whole),
        check_vma=False,
    )(weights, state, rows_NS)


def _chain(
    weights: ModelWeights, state: DeviceState, rows_S: jax.Array, *, config: DraftConfig, most_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """On one device: the drafts of all data ranks, [K, A], and the pool."""
    plan, draft, both = config.layer.plan, draft_of(state), weights_of_both(weights)
    num_rows, page_size = len(state.last_tokens_R), draft.kv_pages.shape[1]
    positions_S = jnp.where(rows_S < num_rows, draft.positions_R.at[rows_S].get(mode="clip"), -1)
    table_SP = with_scratch(
        state, rows_S, positions_S=positions_S, num_scratch=scratch_pages(most_drafts - 1, page_size)
    )

    def drawn(features_SD: jax.Array, position_S: jax.Array) -> jax.Array:
        sampling, _ = sampling_of(state, rows_S, positions_S=position_S)
        sampling = gather_rows(replace(sampling, num_top_S=jnp.zeros_like(sampling.num_top_S)), plan)
        logits_AV = draft_logits(both, features_SD, config=config)
        noise, words = noise_for(weights, config)
        ids_A = sample(logits_AV, sampling, part=config.words, most_top=1, noise=noise).ids_S
        return ids_A if words is None else words[ids_A]

    def ahead(carry: tuple[jax.Array, ...], step: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        features_SD, pages, ids_A = carry
        at_S = positions_S + 1 + step
        at_S = jnp.where((positions_S >= 0) & (at_S < table_SP.shape[1] * page_size), at_S, -1)
        pages_S = jnp.take_along_axis(table_SP, jnp.maximum(at_S, 0)[:, None] // page_size, axis=1)[:, 0]
        slots_S = jnp.where(at_S >= 0, pages_S * page_size + at_S % page_size, 0)
        own_ids_S = ids_A.reshape(plan.data_size, -1)[plan.data_rank()]
        batch = TokenBatch(own_ids_S, at_S, slots_S, table_SP, len(rows_S))
        features_SD, pages = draft_features(both, pages, batch, features_SD, config=config)
        ids_A = drawn(features_SD, positions_S + 3 + step)
        return (features_SD, pages, ids_A), ids_A

    features_SD = draft.features_RD.at[rows_S].get(mode="clip")
    first_A = drawn(features_SD, positions_S + 2)
    carry = features_SD, draft.kv_pages, first_A
    (_, pages, _), others_KA = jax.lax.scan(ahead, carry, jnp.arange(most_drafts - 1))
    return jnp.concatenate([first_A[None], others_KA]), pages


def draft_axes(config: DraftConfig) -> tuple[tuple[str | None, ...], ...]:
    """Logical axes of the arrays of a draft's state over all data ranks."""
    model = config.layer
    row = cache_row(model.spec, tensor_size=model.plan.tensor_size, is_flat=model.kernels.has_flat_rows)
    return row.pool_axes, ROW_AXES, ROW_AXES[:1], ROW_AXES
