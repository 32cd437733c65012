"""A MoE layer over the devices: the selection of experts in logical space, then their sum for each token."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from rayserve_moe.experts.backends import choose_backend
from rayserve_moe.experts.balanced_layer import StepCapacity, assign_slots
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.native_choice import NativeChoice, native_choice
from rayserve_moe.experts.routing import (
    ExpertScores,
    ForcedExperts,
    RouterWeights,
    gates_of,
    rank_experts,
    select_top_k,
    with_forced_gates,
)
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacedExperts, PlacementArrays
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.adapters import RowAdapters, add_carried, carry_ranks
from rayserve_moe.kernels.candidates import Choice
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.tpu.top_experts import StackedRouter


class LayerRouting(NamedTuple):
    """Logical ids [T, K] in router order, and a tally [4] if slots have limited capacity.

    `gates_TK` float32 multiply the experts' outputs, after normalisation, scale and factors; None if not captured.
    `native` is the router's own choice beside the ids, if requested.
    """

    ids_TK: jax.Array
    tally_4: jax.Array | None
    gates_TK: jax.Array | None = None
    native: NativeChoice | None = None


def apply_experts(  # noqa: PLR0913 (keyword arguments that vary by call)
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
    audits: bool = False,
    adapters: RowAdapters | None = None,
) -> tuple[jax.Array, LayerRouting]:
    """Select experts and compute them; return the sums [T, D] and the routing.

    Tokens and outputs belong to this device's data rank, and are the same on every device of a tensor group. `layer`
    counts MoE layers; `maps` hold all of them, and None stands for expert i in slot i. Padding tokens (not `valid_T`)
    cost no expert product. `forced` replaces the router's selection. `capacity` limits slots; an id of -1 then is an
    assignment that was not filled. `audits` requests `LayerRouting.native`. `adapters` change the experts' matrices.

    Raises: KeyError if the backend of `config` is unknown.
    """
    tally_4, native, routed_TD = None, None, hidden_TD if router.rows_TD is None else router.rows_TD
    if config.limits_capacity:
        assert capacity is not None, "slots of limited capacity need it"
        scores = _scores(routed_TD, router, config)
        with jax.named_scope("selection"):
            slots_TK, ids_TK, gates_TK, tally_4 = assign_slots(
                scores, valid_T, maps=maps, layer=layer, capacity=capacity, config=config, forced=forced
            )
        native = native_choice(scores, ids_TK, router=config.router) if audits else None
        maps, config = None, replace(config, slot_choice=CHOSEN_BEFORE)
    else:
        ids_TK, gates_TK, native = _select(routed_TD, router, config, forced=forced, audits=audits)
        slots_TK = ids_TK
    if router.factors_E is not None:
        gates_TK = gates_TK * router.factors_E[ids_TK]
    gates_TK = with_forced_gates(gates_TK, forced)
    of_experts, adapter_T = (None, None) if adapters is None else adapters
    carries = adapters is not None and adapters.experts.share_outer and config.kernels.experts.carries_ranks
    with jax.named_scope("adapters"):
        rows_TY = carry_ranks(hidden_TD, adapters, layer=layer) if carries else hidden_TD
    tokens = RoutedTokens(rows_TY, slots_TK, gates_TK, valid_T, adapter_T)
    placed = PlacedExperts(weights, layer, maps, of_experts)
    backend = choose_backend(tokens, placed, config=config).candidate
    assert backend is not None, "the last candidate takes every call"
    out_TD = backend.run(tokens, placed, config=config)
    if carries:
        with jax.named_scope("adapters"):
            out_TD = add_carried(out_TD, adapters, layer=layer, width=hidden_TD.shape[1])
    return out_TD, LayerRouting(ids_TK, tally_4, gates_TK, native)


def router_choice(
    hidden_TD: jax.Array, router: StackedRouter | None, config: ExpertConfig, *, is_forced: bool
) -> Choice[Callable[..., Any]]:
    """Return the choice of a kernel that computes router and selection at once.

    `is_forced`: the step may force the experts of tokens.
    """
    rule = config.router
    return config.kernels.experts.choose.choose(
        hidden_TD,
        router,
        top_k=rule.top_k,
        score=rule.score,
        finish=partial(gates_of, router=rule),
        is_forced=is_forced,
        is_grouped=rule.groups_kept < rule.num_groups,
    )


def _select(
    hidden_TD: jax.Array, router: RouterWeights, config: ExpertConfig, *, forced: ForcedExperts | None, audits: bool
) -> tuple[jax.Array, jax.Array, NativeChoice | None]:
    """Select experts as `select_top_k`, by a kernel that includes the router if it takes the call."""
    rule = config.router
    choice = router_choice(hidden_TD, router.stacked, config, is_forced=forced is not None)
    if choice.candidate is None:
        scores = _scores(hidden_TD, router, config)
        with jax.named_scope("selection"):
            ids_TK, gates_TK = select_top_k(
                scores,
                router=rule,
                forced=forced,
                by_rows=config.kernels.by_rows,
                total=config.kernels.experts.total,
            )
            return ids_TK, gates_TK, native_choice(scores, ids_TK, router=rule) if audits else None
    with jax.named_scope("selection"):
        finish = partial(gates_of, router=rule)
        chosen = choice.candidate.run(hidden_TD, router.stacked, top_k=rule.top_k, score=rule.score, finish=finish)
        return *chosen, None


@jax.named_scope("router")
def _scores(hidden_TD: jax.Array, router: RouterWeights, config: ExpertConfig) -> ExpertScores:
    """Return the scores of all experts, and the values that decide their choice."""
    scores_TE = config.kernels.experts.router_scores(
        hidden_TD, router.matrix_DE, bias_E=router.logit_bias_E, score=config.router.score
    )
    return rank_experts(scores_TE, router=config.router, selection_bias_E=router.selection_bias_E)
