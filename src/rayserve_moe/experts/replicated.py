"""Experts where the tokens already are: every rank sees all tokens, multiplies its own slots, and the ranks add up.

Tokens are gathered over the data axis. The sums of the ranks are partial ones, so their last bits depend on where
experts lie. On a single device nothing is gathered and nothing is added up.
"""

# T tokens   D model width   K experts per token   W tokens of all data ranks   G chunks

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.experts.chunks import SEND_BYTES
from rayserve_moe.experts.local import LOCAL_EXPERTS, ExpertWeights, ProductRule
from rayserve_moe.experts.rule import ExpertRule
from rayserve_moe.experts.slot_mapping import PlacementArrays, choose_slots
from rayserve_moe.experts.tokens import RoutedTokens, cut_into_chunks
from rayserve_moe.kernels.cpu_native.calls import expert_sums
from rayserve_moe.parallel.sharding import DATA

RESULT_BYTES = 4 * SEND_BYTES
"""Results per pick that a device holds at once where tokens are gathered."""


def apply_local(
    tokens: RoutedTokens, weights: ExpertWeights, *, layer: jax.Array, rule: ExpertRule, maps: PlacementArrays | None
) -> jax.Array:
    """The MoE sum of each token [T, D] where this device holds all slots. ValueError where there are more devices."""
    if rule.plan.num_expert_ranks > 1:
        raise ValueError(
            f"expert backend local is for one device, and experts lie over {rule.plan.num_expert_ranks}: choose auto"
        )
    return _sums_of_my_slots(tokens, weights, layer, rule, maps).astype(tokens.hidden_TD.dtype)


def apply_replicated(
    tokens: RoutedTokens, weights: ExpertWeights, *, layer: jax.Array, rule: ExpertRule, maps: PlacementArrays | None
) -> jax.Array:
    """The MoE sum of each token [T, D], by a gather over data, then sums over all ranks."""
    (num_tokens, width), data_size = tokens.hidden_TD.shape, rule.plan.mesh.shape[DATA]
    if data_size == 1:
        out_TD = _sums_of_my_slots(tokens, weights, layer, rule, maps)
        return rule.plan.sum_over_tensor(out_TD).astype(tokens.hidden_TD.dtype)

    def run(chunk: RoutedTokens) -> jax.Array:
        everyones = RoutedTokens(*(jax.lax.all_gather(array, DATA, axis=0, tiled=True) for array in chunk))
        out_WD = _sums_of_my_slots(everyones, weights, layer, rule, maps)
        return jax.lax.psum_scatter(out_WD, DATA, scatter_dimension=0, tiled=True)

    most = max(1, RESULT_BYTES // (data_size * rule.top_k * width * tokens.hidden_TD.dtype.itemsize))
    out_GTD = jax.lax.map(run, cut_into_chunks(tokens, min(num_tokens, most)))
    out_TD = out_GTD.reshape(-1, width)[:num_tokens]
    return rule.plan.sum_over_tensor(out_TD).astype(tokens.hidden_TD.dtype)


def _sums_of_my_slots(
    tokens: RoutedTokens, weights: ExpertWeights, layer: jax.Array, rule: ExpertRule, maps: PlacementArrays | None
) -> jax.Array:
    """What this rank's slots add to each token: float32 [T, D]. The choice of slots is the same on every rank."""
    hidden_TD, ids_TK, gates_TK, valid_T = tokens
    home_T1 = _home_ranks(len(valid_T), rule)
    slots_TK = choose_slots(ids_TK, valid_T, maps, layer=layer, rank=home_T1, rule=rule)
    num_local = rule.num_local_slots
    local_TK = slots_TK - rule.plan.expert_rank() * num_local
    here_TK = (local_TK >= 0) & (local_TK < num_local) & valid_T[:, None]
    if rule.kernel == "native":
        local_TK = jnp.where(here_TK, local_TK, num_local)
        first = layer * num_local
        return expert_sums(hidden_TD, local_TK, gates_TK, weights, first_slot=first, num_slots=num_local)
    results_TKD = LOCAL_EXPERTS[rule.kernel](
        hidden_TD,
        jnp.where(here_TK, local_TK, num_local),
        weights,
        first_slot=layer * num_local,
        rule=ProductRule(num_local, ids_TK.size / rule.num_experts),
    )
    results_TKD = jnp.where(here_TK[..., None], results_TKD, 0).astype(jnp.float32)
    return jnp.einsum("TK,TKD->TD", gates_TK, results_TKD, precision=jax.lax.Precision.HIGHEST)


def _home_ranks(num_tokens: int, rule: ExpertRule) -> jax.Array:
    """First rank of the data rank that each gathered token comes from: [T, 1]."""
    per_data_rank = num_tokens // rule.plan.mesh.shape[DATA]
    return (jnp.arange(num_tokens, dtype=jnp.int32) // per_data_rank * rule.plan.tensor_size)[:, None]
