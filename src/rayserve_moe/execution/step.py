"""The step itself, as a pure function over the whole mesh: forward, head, sampling."""

# S sampled rows   V vocabulary

from __future__ import annotations

from typing import cast

import jax
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import sample
from rayserve_moe.execution.step_types import DeviceState, StepInput, StepOutput
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ForwardOutput, ModelRule, Parameters, forward, logits_of

KV_AXES = (None, None, "kv_heads", None)


def run_step(
    params: Parameters, state: DeviceState, *, step: StepInput, rule: ModelRule, capture_routing: bool
) -> tuple[DeviceState, StepOutput]:
    """Compute one step on every device of the mesh; outputs are the same on all of them."""

    def on_device(params: Parameters, state: DeviceState, step: StepInput) -> tuple[DeviceState, StepOutput]:
        out, logits_SV = step_logits(params, state.kv_pages, step=step, rule=rule)
        ids_S, logprobs_S, finite_S = sample(logits_SV, step.sampling)
        counts = state.expert_counts_ME + out.expert_counts_ME
        routing = out.topk_ids_MTK.astype(rule.spec.routing_layout.dtype) if capture_routing else None
        return DeviceState(out.kv_pages, counts), StepOutput(ids_S, logprobs_S, finite_S, routing)

    state_parts = _state_partitions(rule)
    return jax.shard_map(
        on_device,
        mesh=rule.plan.mesh,
        in_specs=(_parameter_partitions(rule), state_parts, PartitionSpec()),
        out_specs=(state_parts, PartitionSpec()),
        check_vma=False,
    )(params, state, step)


def step_logits(
    params: Parameters, kv_pages: jax.Array, *, step: StepInput, rule: ModelRule
) -> tuple[ForwardOutput, jax.Array]:
    """On one device: forward, then float32 logits [S, V] of the tokens that are sampled from."""
    out = forward(params, kv_pages, step.batch, rule=rule)
    return out, logits_of(params, out.hidden_TD[step.sampled_tokens_S], rule=rule)


def _state_partitions(rule: ModelRule) -> DeviceState:
    """The tree of a DeviceState with partitions for arrays."""
    return DeviceState(cast(jax.Array, rule.plan.partition(KV_AXES)), cast(jax.Array, PartitionSpec()))


def _parameter_partitions(rule: ModelRule) -> dict[str, dict[str, PartitionSpec]]:
    tree = parameter_specs(rule.spec, dtype="float32")
    return {group: {name: rule.plan.partition(p.axes) for name, p in specs.items()} for group, specs in tree.items()}
