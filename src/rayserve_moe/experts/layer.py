"""One MoE layer over the devices: select experts in logical space, then let tokens and experts meet."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax

from rayserve_moe.experts.backends import EXPERT_BACKENDS, choose_backend, choose_between_slices
from rayserve_moe.experts.balanced_layer import StepCapacity, assign_slots
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.pushed import why_not_pushed
from rayserve_moe.experts.routing import (
    ExpertScores,
    ForcedExperts,
    RouterWeights,
    gates_of,
    rank_experts,
    select_top_k,
)
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacedExperts, PlacementArrays
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.parallel.mesh import platform_of


class LayerRouting(NamedTuple):
    """Logical ids [T, K] in router order, and a tally [4] where slots have limited capacity."""

    ids_TK: jax.Array
    tally_4: jax.Array | None


def apply_experts(  # noqa: PLR0913 (what differs from call to call is by keyword)
    hidden_TD: jax.Array,
    router: RouterWeights,
    weights: ExpertWeights,
    *,
    layer: jax.Array,
    valid_T: jax.Array,
    config: ExpertConfig,
    maps: PlacementArrays | None = None,
    forced: ForcedExperts | None = None,
    capacity: StepCapacity | None = None,
) -> tuple[jax.Array, LayerRouting]:
    """Select experts and compute them; returns the sums [T, D] and the routing.

    Tokens are those of this device's data rank, and so are the outputs: the same on every device of a tensor group.
    `layer` counts MoE layers; `maps` hold all of them, and None stands for expert i in slot i. Padding tokens (not
    `valid_T`) cost no expert product. `forced` replaces what the router selects. `capacity` is given where it is
    limited; an id of -1 then is an assignment that was not filled. KeyError where the backend of `config` is unknown.
    """
    tally_4 = None
    if config.limits_capacity:
        assert capacity is not None, "slots of limited capacity need it"
        scores = _scores(hidden_TD, router, config)
        with jax.named_scope("selection"):
            slots_TK, ids_TK, gates_TK, tally_4 = assign_slots(
                scores, valid_T, maps=maps, layer=layer, capacity=capacity, config=config, forced=forced
            )
        tokens = RoutedTokens(hidden_TD, slots_TK, gates_TK, valid_T)
        maps, config = None, replace(config, slot_choice=CHOSEN_BEFORE)
    else:
        ids_TK, gates_TK = _chosen(hidden_TD, router, config, forced)
        tokens = RoutedTokens(hidden_TD, ids_TK, gates_TK, valid_T)
    apply = EXPERT_BACKENDS[backend_for(hidden_TD, weights, config=config)]
    out_TD = apply(tokens, PlacedExperts(weights, layer, maps), config=config)
    return out_TD, LayerRouting(ids_TK, tally_4)


def _chosen(
    hidden_TD: jax.Array, router: RouterWeights, config: ExpertConfig, forced: ForcedExperts | None
) -> tuple[jax.Array, jax.Array]:
    """Ids and weights by `select_top_k`, or by a kernel that computes the router with them, if it can."""
    rule, choose = config.router, config.kernels.experts.choose
    if choose is not None and router.stacked is not None and forced is None and rule.groups_kept == rule.num_groups:
        with jax.named_scope("selection"):
            finish = partial(gates_of, router=rule)
            chosen = choose(hidden_TD, router.stacked, top_k=rule.top_k, score=rule.score, finish=finish)
        if chosen is not None:
            return chosen
    scores = _scores(hidden_TD, router, config)
    with jax.named_scope("selection"):
        return select_top_k(scores, router=rule, forced=forced)


@jax.named_scope("router")
def _scores(hidden_TD: jax.Array, router: RouterWeights, config: ExpertConfig) -> ExpertScores:
    """Scores of all experts, and what they are chosen by."""
    scores_TE = config.kernels.experts.router_scores(
        hidden_TD, router.matrix_DE, bias_E=router.logit_bias_E, score=config.router.score
    )
    return rank_experts(scores_TE, router=config.router, selection_bias_E=router.selection_bias_E)


def backend_for(hidden_TD: jax.Array, weights: ExpertWeights, *, config: ExpertConfig) -> str:
    """The backend that `config` names, or the one that suits these tokens where that is `auto`.

    On several TPUs `pushed` where the kernel can do it, else by the bytes that cross devices.
    """
    if config.backend != "auto":
        return config.backend
    is_shared = config.plan.num_expert_ranks > 1 and platform_of(config.plan.mesh) != "cpu"
    if is_shared and not why_not_pushed(hidden_TD, weights, config):
        return "pushed"
    num_tokens, width = hidden_TD.shape
    tokens_per_device, platform = -(-num_tokens // config.plan.tensor_size), platform_of(config.plan.mesh)
    if platform != "cpu" and config.plan.num_slices > 1:
        return choose_between_slices(tokens_per_device, num_slices=config.plan.num_slices, top_k=config.router.top_k)
    return choose_backend(
        tokens_per_device,
        ep_size=config.plan.num_expert_ranks,
        tensor_size=config.plan.tensor_size,
        platform=platform,
        top_k=config.router.top_k,
        row_bytes=width * hidden_TD.dtype.itemsize,
    )
