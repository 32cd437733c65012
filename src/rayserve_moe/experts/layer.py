"""One MoE layer over the devices: select experts in logical space, then let tokens and experts meet."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax

from rayserve_moe.experts.backends import EXPERT_BACKENDS, choose_backend
from rayserve_moe.experts.balanced_layer import Room, pick_with_room
from rayserve_moe.experts.local import ExpertWeights
from rayserve_moe.experts.routing import ForcedPicks, best_of_scores, count_tokens, router_scores
from rayserve_moe.experts.rule import ExpertRule
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacementArrays
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.parallel.mesh import platform_of


class LayerOutput(NamedTuple):
    """Sums [T, D], logical ids [T, K] in router order, tokens per expert [E], and a tally where slots limit room."""

    out_TD: jax.Array
    ids_TK: jax.Array
    counts_E: jax.Array
    tally_4: jax.Array | None


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
    room: Room | None = None,
) -> LayerOutput:
    """Select experts, compute them, and tell what was selected.

    Tokens are those of this device's data rank, and so are the outputs: the same on every device of a tensor group,
    the counts too. `layer` counts MoE layers; `maps` hold all of them, and None stands for expert i in slot i. Padding
    tokens (not `valid_T`) cost no expert product and are not counted. `forced` replaces what the router selects.
    `room` is for rules that limit it; an id of -1 then is a pick that came to nothing. KeyError where the
    rule's backend is unknown.
    """
    is_native, tally_4 = rule.kernel == "native", None
    scores_TE = router_scores(hidden_TD, router_DE, is_native=is_native)
    if rule.limits_room:
        assert room is not None, "slots with limited room need to know it"
        slots_TK, ids_TK, gates_TK, tally_4 = pick_with_room(
            scores_TE,
            valid_T,
            maps=maps,
            layer=layer,
            room=room,
            rule=rule,
            forced=forced,
        )
        tokens = RoutedTokens(hidden_TD, slots_TK, gates_TK, valid_T)
        maps, rule = None, replace(rule, slot_choice=CHOSEN_BEFORE)
    else:
        ids_TK, gates_TK = best_of_scores(scores_TE, top_k=rule.top_k, renormalize=rule.renormalize, forced=forced)
        tokens = RoutedTokens(hidden_TD, ids_TK, gates_TK, valid_T)
    counts_E = count_tokens(ids_TK, valid_T, num_experts=rule.num_experts)
    out_TD = EXPERT_BACKENDS[backend_for(hidden_TD, rule)](tokens, weights, layer=layer, rule=rule, maps=maps)
    return LayerOutput(out_TD, ids_TK, counts_E, tally_4)


def backend_for(hidden_TD: jax.Array, rule: ExpertRule) -> str:
    """The backend that the rule names, or that suits these tokens where it leaves the choice."""
    if rule.backend != "auto":
        return rule.backend
    num_tokens, width = hidden_TD.shape
    return choose_backend(
        -(-num_tokens // rule.plan.tensor_size),
        ep_size=rule.plan.num_expert_ranks,
        tensor_size=rule.plan.tensor_size,
        platform=platform_of(rule.plan.mesh),
        top_k=rule.top_k,
        row_bytes=width * hidden_TD.dtype.itemsize,
    )
