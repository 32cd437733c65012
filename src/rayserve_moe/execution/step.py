"""The step itself, as a pure function over the whole mesh: unpack, forward, head, sampling."""

# S sampled rows   J likeliest tokens   X tokens in prefill blocks   V vocabulary
# W words of a data rank's input vector   N data ranks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.adjustment import adjust, note_samples
from rayserve_moe.decoding.sampling import Noise, Sampled, TopTokens, sample
from rayserve_moe.execution.prompt_scores import score_prompts
from rayserve_moe.execution.step_input import DeviceInput, InputLayout, change_pages, unpack
from rayserve_moe.execution.step_types import BlockInputs, DeviceState, ModelWeights, StepOutput
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.model.kv_cache import cache_row
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ForwardOutput, ModelConfig, Parameters, forward, logits_of
from rayserve_moe.request_fields import MAX_TOP_LOGPROBS

COUNT_AXES = ROW_AXES = ("data_ranks", None)

RowUpdate = Callable[..., DeviceState]
"""Takes a data rank's DeviceState, a vector of changes, and `data_rank`."""


@dataclass(frozen=True)
class StepConfig:
    """All that is fixed when a step is compiled, besides its shape; `layer_pages` as in `TokenBatch`."""

    model: ModelConfig
    page_size: int
    capture_routing: bool
    layer_pages: tuple[LayerPages, ...] = ()


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
        out, logits_SV = step_logits(
            weights,
            state.kv_pages,
            batch=step.batch,
            sample_places_S=step.sample_places_S,
            forced_MXK=blocks and blocks.forced_NMXK[0],
            config=config.model,
        )
        state = replace(state, kv_pages=out.kv_pages)
        sampled, state = _sampled(logits_SV, state, step, noise=config.model.kernels.noise)
        state = replace(state, expert_counts_ME=state.expert_counts_ME + out.expert_counts_ME)
        scores = (None, None) if blocks is None else _scores(weights, out, step, blocks, config.model)
        tally_14 = None if out.tally_4 is None else out.tally_4[None]
        local = StepOutput(_sampled_bits(sampled)[None], None, _top_bits(sampled.top)[None], *scores, tally_N4=tally_14)
        output = jax.tree.map(partial(plan.gather_data_ranks, dim=0), local)
        return state, replace(output, topk_ids_MTK=_captured_routing(out, config))

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
    """On one device: forward, then float32 logits [S, V] of the tokens at `sample_places_S`."""
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
    logits_SV: jax.Array, state: DeviceState, step: DeviceInput, *, noise: Noise
) -> tuple[Sampled, DeviceState]:
    """Sample, and record of the rows what they have sampled."""
    of_rows = {"rows_S": step.sample_rows_S, "penalties": step.penalties}
    adjusted_SV = adjust(logits_SV, state, **of_rows)
    sampled = sample(adjusted_SV, step.sampling, most_top=MAX_TOP_LOGPROBS, noise=noise)
    last_tokens_R = state.last_tokens_R.at[step.sample_rows_S].set(sampled.ids_S, mode="drop")
    seen_RV = note_samples(state.seen_RV, sampled.ids_S, **of_rows)
    return sampled, replace(state, last_tokens_R=last_tokens_R, seen_RV=seen_RV)


def _sampled_bits(sampled: Sampled) -> jax.Array:
    """Ids, bits of the log-probs, and ranks, 0 where logits were not finite: int32 [3, S]."""
    bits_S = jax.lax.bitcast_convert_type(sampled.logprobs_S.astype(jnp.float32), jnp.int32)
    return jnp.stack([sampled.ids_S, bits_S, jnp.where(sampled.finite_S, sampled.ranks_S, 0)])


def _top_bits(top: TopTokens) -> jax.Array:
    """Ids, and bits of the log-probs, int32 [2, S, J]."""
    return jnp.stack([top.ids_SJ, jax.lax.bitcast_convert_type(top.logprobs_SJ, jnp.int32)])


def _scores(
    weights: ModelWeights, out: ForwardOutput, step: DeviceInput, blocks: BlockInputs, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores of the tokens in prefill blocks, and the likeliest tokens there."""
    hidden_XD = out.hidden_TD[step.batch.num_singles :]
    wants_top_X = jnp.repeat(step.block_wants_top_B, len(hidden_XD) // len(step.block_wants_top_B))
    return score_prompts(
        weights.params, hidden_XD, targets_NX=blocks.targets_NX, wants_top_X=wants_top_X, config=config
    )


def update_rows(state: DeviceState, vector: jax.Array, *, apply: RowUpdate, config: StepConfig) -> DeviceState:
    """Apply changes of rows (`apply_update`, `apply_adjustment`) on every device of the mesh."""
    plan = config.model.plan

    def on_device(state: DeviceState, vector: jax.Array) -> DeviceState:
        with jax.named_scope("row_update"):
            return apply(state, vector, data_rank=plan.data_rank())

    parts = state_partitions(config.model)
    inputs = (parts, PartitionSpec())
    return jax.shard_map(on_device, mesh=plan.mesh, in_specs=inputs, out_specs=parts, check_vma=False)(state, vector)


def state_partitions(config: ModelConfig) -> DeviceState:
    """The tree of a DeviceState with partitions for arrays."""
    kv_axes = cache_row(config.spec, tensor_size=config.plan.tensor_size).pool_axes
    kv, counts, rows, last_tokens = (
        cast(jax.Array, config.plan.partition(axes)) for axes in (kv_axes, COUNT_AXES, ROW_AXES, ROW_AXES[:1])
    )
    adjustments = (rows, rows, rows)
    return DeviceState(*adjustments, kv, counts, rows, rows, rows, last_tokens)


def block_partitions(config: ModelConfig, blocks: BlockInputs | None) -> BlockInputs | None:
    """The tree of `blocks` with partitions for arrays: forced routing goes where its tokens are."""
    if blocks is None:
        return None
    return BlockInputs(cast(jax.Array, config.plan.partition(("data_ranks",))), cast(jax.Array, PartitionSpec()))


def weight_partitions(config: ModelConfig) -> ModelWeights:
    """The tree of ModelWeights with partitions for arrays; the maps are the same on every device."""
    tree = parameter_specs(config.spec, dtype="float32")
    params = {
        group: {name: config.plan.partition(p.axes) for name, p in specs.items()} for group, specs in tree.items()
    }
    whole = PartitionSpec()
    return ModelWeights(cast(Parameters, params), cast(PlacementArrays, whole), cast(jax.Array, whole))
