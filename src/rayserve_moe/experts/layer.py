"""One MoE layer over the devices: select, multiply where the experts lie, combine by a sum over the devices."""

# T tokens   D model width   E experts   K experts per token   X layers * local slots

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rayserve_moe.experts.local import LOCAL_EXPERTS, ExpertWeights
from rayserve_moe.experts.routing import count_tokens, select_experts
from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class ExpertRule:
    """What is fixed about the MoE layers of a model: how experts are chosen, computed, and spread over devices."""

    num_experts: int
    top_k: int
    renormalize: bool
    kernel: str
    plan: ParallelPlan

    @property
    def num_local_slots(self) -> int:
        return self.num_experts // self.plan.num_expert_ranks


def apply_experts(
    hidden_TD: jax.Array,
    router_DE: jax.Array,
    weights: ExpertWeights,
    *,
    layer: jax.Array,
    valid_T: jax.Array,
    rule: ExpertRule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the layer's output [T, D], the logical ids [T, K] in router order, and tokens per expert [E].

    `layer` counts MoE layers. Padding tokens (not `valid_T`) cost no expert product.
    """
    ids_TK, gates_TK = select_experts(hidden_TD, router_DE, top_k=rule.top_k, renormalize=rule.renormalize)
    counts_E = count_tokens(ids_TK, valid_T, num_experts=rule.num_experts)
    slots_TK = _local_slots(ids_TK, valid_T, rule)
    results_TKD = LOCAL_EXPERTS[rule.kernel](
        hidden_TD,
        slots_TK,
        weights,
        first_slot=layer * rule.num_local_slots,
        num_slots=rule.num_local_slots,
        num_ranks=rule.plan.num_expert_ranks,
    )
    combined_TD = jnp.einsum(
        "TK,TKD->TD", gates_TK, results_TKD.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return rule.plan.sum_over_tensor(combined_TD).astype(hidden_TD.dtype), ids_TK, counts_E


def _local_slots(ids_TK: jax.Array, valid_T: jax.Array, rule: ExpertRule) -> jax.Array:
    """Slot of each pick on this device; `num_local_slots` where the expert lies elsewhere or the token is padding."""
    slots_TK = ids_TK - rule.plan.expert_rank() * rule.num_local_slots
    here = (slots_TK >= 0) & (slots_TK < rule.num_local_slots) & valid_T[:, None]
    return jnp.where(here, slots_TK, rule.num_local_slots)
