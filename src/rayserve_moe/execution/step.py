"""The step itself, as a pure function over the whole mesh: unpack, forward, head, sampling."""

# S sampled rows   V vocabulary   W words of a data rank's input vector   N data ranks

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import sample
from rayserve_moe.execution.row_updates import apply_update
from rayserve_moe.execution.step_input import InputLayout, change_pages, unpack
from rayserve_moe.execution.step_types import DeviceState, ModelWeights, RowState, StepOutput
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.model.transformer import ForwardOutput, ModelRule, Parameters, forward, logits_of

KV_AXES = ("data_ranks", None, "kv_heads", None)
COUNT_AXES = ROW_AXES = ("data_ranks", None)


@dataclass(frozen=True)
class StepRule:
    """All that is fixed when a step is compiled, besides its shape."""

    model: ModelRule
    page_size: int
    capture_routing: bool


def run_step(
    weights: ModelWeights, state: DeviceState, *, vectors_NW: jax.Array, layout: InputLayout, rule: StepRule
) -> tuple[DeviceState, StepOutput]:
    """Compute one step on every device of the mesh; the output is the same on all of them."""
    plan = rule.model.plan

    def on_device(weights: ModelWeights, state: DeviceState, vectors_NW: jax.Array) -> tuple[DeviceState, StepOutput]:
        vector_W = vectors_NW[plan.data_rank()]
        rows = replace(state.rows, page_table_RP=change_pages(state.rows, vector_W, layout=layout))
        step = unpack(vector_W, rows, layout=layout, page_size=rule.page_size)
        out, logits_SV = step_logits(
            weights, state.kv_pages, batch=step.batch, sample_places_S=step.sample_places_S, rule=rule.model
        )
        ids_S, logprobs_S, finite_S = sample(logits_SV, step.sampling)
        last_tokens_R = rows.last_tokens_R.at[step.sample_rows_S].set(ids_S, mode="drop")
        counts_ME = state.expert_counts_ME + out.expert_counts_ME
        state = DeviceState(out.kv_pages, counts_ME, replace(rows, last_tokens_R=last_tokens_R))
        bits_S = jax.lax.bitcast_convert_type(logprobs_S.astype(jnp.float32), jnp.int32)
        sampled_of_rank = jnp.stack([ids_S, bits_S, finite_S.astype(jnp.int32)])
        sampled_N3S = plan.gather_data_ranks(sampled_of_rank[None], dim=0)
        routing = None
        if rule.capture_routing:
            dtype = rule.model.spec.routing_layout.dtype
            routing = plan.gather_data_ranks(out.topk_ids_MTK.astype(dtype), dim=1)
        return state, StepOutput(sampled_N3S, routing)

    state_parts = state_partitions(rule.model)
    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(rule.model), state_parts, PartitionSpec()),
        out_specs=(state_parts, PartitionSpec()),
        check_vma=False,
    )(weights, state, vectors_NW)


def step_logits(
    weights: ModelWeights, kv_pages: jax.Array, *, batch: TokenBatch, sample_places_S: jax.Array, rule: ModelRule
) -> tuple[ForwardOutput, jax.Array]:
    """On one device: forward, then float32 logits [S, V] of the tokens at `sample_places_S`."""
    out = forward(weights.params, kv_pages, batch, rule=rule, maps=weights.maps)
    return out, logits_of(weights.params, out.hidden_TD[sample_places_S], rule=rule)


def update_rows(state: DeviceState, vector: jax.Array, *, rule: StepRule) -> DeviceState:
    """Take over changes of rows (see `row_updates`) on every device of the mesh."""
    plan = rule.model.plan

    def on_device(rows: RowState, vector: jax.Array) -> RowState:
        return apply_update(rows, vector, data_rank=plan.data_rank())

    parts = state_partitions(rule.model).rows
    rows = jax.shard_map(
        on_device, mesh=plan.mesh, in_specs=(parts, PartitionSpec()), out_specs=parts, check_vma=False
    )(state.rows, vector)
    return replace(state, rows=rows)


def state_partitions(rule: ModelRule) -> DeviceState:
    """The tree of a DeviceState with partitions for arrays."""
    kv, counts, rows = (cast(jax.Array, rule.plan.partition(axes)) for axes in (KV_AXES, COUNT_AXES, ROW_AXES))
    return DeviceState(kv, counts, RowState(rows, rows, rows, cast(jax.Array, rule.plan.partition(ROW_AXES[:1]))))


def weight_partitions(rule: ModelRule) -> ModelWeights:
    """The tree of ModelWeights with partitions for arrays; the maps are the same on every device."""
    tree = parameter_specs(rule.spec, dtype="float32")
    params = {group: {name: rule.plan.partition(p.axes) for name, p in specs.items()} for group, specs in tree.items()}
    return ModelWeights(cast(Parameters, params), cast(PlacementArrays, PartitionSpec()))
