"""The step itself, as a pure function over the whole mesh: unpack, forward, head, sampling."""

# S samples of a data rank   A samples of all data ranks   V vocabulary (local share)   J likeliest tokens
# P values of a sample   X tokens in prefill blocks   W words of a data rank's input vector   N data ranks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.adjustment import adjust, note_samples
from rayserve_moe.decoding.drafts import accepted, drafts_of
from rayserve_moe.decoding.log_probs import TopTokens
from rayserve_moe.decoding.sampling import Sampled, sample
from rayserve_moe.execution.prompt_scores import score_prompts
from rayserve_moe.execution.row_updates import apply_adjustment, apply_update
from rayserve_moe.execution.step_input import DeviceInput, InputLayout, change_pages, unpack
from rayserve_moe.execution.step_types import BlockInputs, DeviceState, ModelWeights, StepOutput
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.model.kv_cache import cache_row
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ForwardOutput, ModelConfig, Parameters, forward, logits_of, words_of
from rayserve_moe.parallel.sharding import gather_rows
from rayserve_moe.request_fields import MAX_TOP_LOGPROBS

COUNT_AXES = ROW_AXES = ("data_ranks", None)
WORD_AXES: tuple[str | None, ...] = (None, "vocabulary")
BIAS_AXES: tuple[str | None, ...] = (None, None)


@dataclass(frozen=True)
class StepConfig:
    """All that is fixed when a step is compiled, besides its shape; `layer_pages` as in `TokenBatch`.

    `most_drafts` is that of any `StepPlan`.
    """

    model: ModelConfig
    page_size: int
    capture_routing: bool
    layer_pages: tuple[LayerPages, ...] = ()
    most_drafts: int = 0


def run_step(
    weights: ModelWeights,
    state: DeviceState,
    *,
    vectors_NW: jax.Array,
    blocks: BlockInputs | None,
    layout: InputLayout,
    config: StepConfig,
) -> tuple[DeviceState, StepOutput]:
    """Compute one step on every device of the mesh; returns a StepOutput, the same on all of them.

    `blocks` comes with shapes that have prefill blocks, and with no others.
    """
    plan = config.model.plan

    def on_device(
        weights: ModelWeights, state: DeviceState, vectors_NW: jax.Array, blocks: BlockInputs | None
    ) -> tuple[DeviceState, StepOutput]:
        vector_W = vectors_NW[plan.data_rank()]
        state = replace(state, page_table_RP=change_pages(state, vector_W, layout=layout))
        step = unpack(vector_W, state, layout=layout, page_size=config.page_size, layer_pages=config.layer_pages)
        out, logits_AV = step_logits(
            weights,
            state.kv_pages,
            batch=step.batch,
            sample_places_S=step.sample_places_S,
            forced_MXK=blocks and blocks.forced_NMXK[0],
            config=config.model,
        )
        state = replace(state, kv_pages=out.kv_pages)
        sampled, state = _sampled(logits_AV, state, step, config=config)
        state = replace(state, expert_counts_ME=state.expert_counts_ME + out.expert_counts_ME)
        scores = (None, None) if blocks is None else _scores(weights, out, step, blocks, config.model)
        tally_N4 = None if out.tally_4 is None else plan.gather_data_ranks(out.tally_4[None], dim=0)
        bits = (
            _sampled_bits(sampled, plan.data_size),
            _captured_routing(out, config),
            _top_bits(sampled.top, plan.data_size),
        )
        return state, StepOutput(*bits, *scores, tally_N4=tally_N4)

    model, whole = config.model, PartitionSpec()
    state_parts = state_partitions(model)
    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(model), state_parts, whole, block_partitions(model, blocks)),
        out_specs=(state_parts, whole),
        check_vma=False,
    )(weights, state, vectors_NW, blocks)


def _captured_routing(out: ForwardOutput, config: StepConfig) -> jax.Array | None:
    """Routing of the tokens of all data ranks in the store's dtype, [M, T, K]; None where it is not captured."""
    if not config.capture_routing:
        return None
    with jax.named_scope("routing_capture"):
        ids_MTK = out.topk_ids_MTK.astype(config.model.spec.routing_layout.dtype)
        return config.model.plan.gather_data_ranks(ids_MTK, dim=1)


def step_logits(
    weights: ModelWeights,
    kv_pages: jax.Array,
    *,
    batch: TokenBatch,
    sample_places_S: jax.Array,
    config: ModelConfig,
    forced_MXK: jax.Array | None = None,
) -> tuple[ForwardOutput, jax.Array]:
    """On one device: forward, then float32 logits [A, V] of the tokens at `sample_places_S` of every data rank."""
    out = forward(
        weights.params,
        kv_pages,
        batch,
        config=config,
        maps=weights.maps,
        forced_MXK=forced_MXK,
        capacity_factor=weights.capacity_factor,
    )
    return out, logits_of(weights.params, out.hidden_TD[sample_places_S], config=config)


def _sampled(
    logits_AV: jax.Array, state: DeviceState, step: DeviceInput, *, config: StepConfig
) -> tuple[Sampled, DeviceState]:
    """Sample for all data ranks, and record of the rows what they have sampled: of drafts up to the first wrong one."""
    plan, part, num_rows = config.model.plan, words_of(config.model), len(state.last_tokens_R)
    is_real_S = step.sample_rows_S < num_rows
    rows_S = jnp.where(is_real_S, plan.data_rank() * num_rows + step.sample_rows_S, len(state.seen_RV))
    given = (rows_S, step.sampling, step.penalties)
    inputs = (step.batch.token_ids_T[step.sample_places_S],) if config.most_drafts else ()
    rows_A, sampling, penalties, *inputs = gather_rows((*given, *inputs), plan)
    drafts = drafts_of(rows_A, sampling.position_S, *inputs, most_drafts=config.most_drafts) if inputs else None
    of_rows = {"rows_S": rows_A, "penalties": penalties, "part": part}
    adjusted_AV = adjust(logits_AV, state, **of_rows, drafted_SK=drafts and drafts.drafted_SK)
    kernels = {"noise": config.model.kernels.noise, "masses": config.model.kernels.masses}
    sampled = sample(adjusted_AV, sampling, part=part, most_top=MAX_TOP_LOGPROBS, **kernels)
    own_ids_S, own_rows_S = sampled.ids_S.reshape(plan.data_size, -1)[plan.data_rank()], step.sample_rows_S
    if drafts is not None:
        counts_A, is_last_A = accepted(sampled.ids_S, drafts)
        of_rows["rows_S"] = jnp.where(counts_A, rows_A, len(state.seen_RV))
        own_rows_S = jnp.where(is_last_A.reshape(plan.data_size, -1)[plan.data_rank()], own_rows_S, num_rows)
    last_tokens_R = state.last_tokens_R.at[own_rows_S].set(own_ids_S, mode="drop")
    seen_RV = note_samples(state.seen_RV, sampled.ids_S, **of_rows)
    return sampled, replace(state, last_tokens_R=last_tokens_R, seen_RV=seen_RV)


def _sampled_bits(sampled: Sampled, num_ranks: int) -> jax.Array:
    """Ids, bits of the log-probs, and ranks, 0 where logits were not finite: int32 [N, 3, S]."""
    bits_A = jax.lax.bitcast_convert_type(sampled.logprobs_S, jnp.int32)
    joined_PA = jnp.stack([sampled.ids_S, bits_A, jnp.where(sampled.finite_S, sampled.ranks_S, 0)])
    return jnp.moveaxis(joined_PA.reshape(3, num_ranks, -1), 1, 0)


def _top_bits(top: TopTokens, num_ranks: int) -> jax.Array:
    """Ids, and bits of the log-probs, int32 [N, 2, S, J]."""
    joined_PAJ = jnp.stack([top.ids_SJ, jax.lax.bitcast_convert_type(top.logprobs_SJ, jnp.int32)])
    return jnp.moveaxis(joined_PAJ.reshape(2, num_ranks, -1, joined_PAJ.shape[-1]), 1, 0)


def _scores(
    weights: ModelWeights, out: ForwardOutput, step: DeviceInput, blocks: BlockInputs, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores of the tokens in prefill blocks of all data ranks, and the likeliest tokens there."""
    hidden_XD = out.hidden_TD[step.batch.num_singles :]
    wants_top_NB = config.plan.gather_data_ranks(step.block_wants_top_B[None], dim=0)
    wants_top_NX = jnp.repeat(wants_top_NB, len(hidden_XD) // wants_top_NB.shape[1], axis=1)
    return score_prompts(
        weights.params, hidden_XD, targets_NX=blocks.targets_NX, wants_top_NX=wants_top_NX, config=config
    )


def update_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Take over changes of rows (`apply_update`) on every device of the mesh."""
    plan = config.model.plan
    return _on_all_devices(lambda *given: apply_update(*given, data_rank=plan.data_rank()), state, vector, config)


def adjust_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Take over what adjusts a row (`apply_adjustment`) on every device of the mesh."""
    part = words_of(config.model)
    return _on_all_devices(lambda *given: apply_adjustment(*given, part=part), state, vector, config)


def _on_all_devices(
    apply: Callable[..., DeviceState], state: DeviceState, vector: jax.Array, config: StepConfig
) -> DeviceState:
    parts = state_partitions(config.model)
    inputs = (parts, PartitionSpec())
    on_device = jax.named_scope("row_update")(apply)
    return jax.shard_map(on_device, mesh=config.model.plan.mesh, in_specs=inputs, out_specs=parts, check_vma=False)(
        state, vector
    )


def state_partitions(config: ModelConfig) -> DeviceState:
    """The tree of a DeviceState with partitions for arrays."""
    row = cache_row(config.spec, tensor_size=config.plan.tensor_size, is_flat=config.kernels.has_flat_rows)
    axes_of_arrays = (
        WORD_AXES,
        BIAS_AXES,
        BIAS_AXES,
        row.pool_axes,
        COUNT_AXES,
        ROW_AXES,
        ROW_AXES,
        ROW_AXES,
        ROW_AXES[:1],
    )
    return DeviceState(*(cast(jax.Array, config.plan.partition(axes)) for axes in axes_of_arrays))


def block_partitions(config: ModelConfig, blocks: BlockInputs | None) -> BlockInputs | None:
    """The tree of `blocks` with partitions for arrays: forced routing goes where its tokens are."""
    if blocks is None:
        return None
    return BlockInputs(cast(jax.Array, config.plan.partition(("data_ranks",))), cast(jax.Array, PartitionSpec()))


def weight_partitions(config: ModelConfig) -> ModelWeights:
    """The tree of ModelWeights with partitions for arrays; the maps are the same on every device."""
    tree = parameter_specs(config.spec, dtype="float32", expert_dtype=config.experts.weight_dtype)
    params = {
        group: {name: config.plan.partition(p.axes) for name, p in specs.items()} for group, specs in tree.items()
    }
    whole = PartitionSpec()
    return ModelWeights(cast(Parameters, params), cast(PlacementArrays, whole), cast(jax.Array, whole))
