"""One MoE layer over the devices: select experts in logical space, then let tokens and experts meet."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

import jax

from rayserve_moe.experts.backends import EXPERT_BACKENDS, choose_backend
from rayserve_moe.experts.local import ExpertWeights
from rayserve_moe.experts.routing import ForcedPicks, count_tokens, select_experts
from rayserve_moe.experts.rule import ExpertRule
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.experts.tokens import RoutedTokens


def apply_experts(  # noqa: PLR0913 (what differs from call to call is by keyword)
    hidden_TD: jax.Array,
    router_DE: jax.Array,
    weights: ExpertWeights,
    *,
    layer: jax.Array,
    valid_T: jax.Array,
    rule: ExpertRule,
    maps: PlacementArrays | None = None,
    forced: ForcedPicks | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the layer's output [T, D], the logical ids [T, K] in router order, and tokens per expert [E].

    Tokens are those of this device's data rank, and so are the outputs: the same on every device of a tensor group,
    the counts too. `layer` counts MoE layers; `maps` hold all of them, and None stands for expert i in slot i. Padding
    tokens (not `valid_T`) cost no expert product and are not counted. `forced` replaces what the router selects.
    KeyError where the rule's backend is unknown.
    """
    ids_TK, gates_TK = select_experts(
        hidden_TD,
        router_DE,
        top_k=rule.top_k,
        renormalize=rule.renormalize,
        forced=forced,
        is_native=rule.kernel == "native",
    )
    counts_E = count_tokens(ids_TK, valid_T, num_experts=rule.num_experts)
    tokens = RoutedTokens(hidden_TD, ids_TK, gates_TK, valid_T)
    out_TD = EXPERT_BACKENDS[backend_for(hidden_TD, rule)](tokens, weights, layer=layer, rule=rule, maps=maps)
    return out_TD, ids_TK, counts_E


def backend_for(hidden_TD: jax.Array, rule: ExpertRule) -> str:
    """The backend that the rule names, or that suits these tokens where it leaves the choice."""
    if rule.backend != "auto":
        return rule.backend
    num_tokens, width = hidden_TD.shape
    return choose_backend(
        -(-num_tokens // rule.plan.tensor_size),
        ep_size=rule.plan.num_expert_ranks,
        tensor_size=rule.plan.tensor_size,
        platform=rule.platform,
        top_k=rule.top_k,
        row_bytes=width * hidden_TD.dtype.itemsize,
    )
