"""What routers and experts compute, token by token in float64: the definition that the kernels are held to."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

import numpy as np

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.reference.activations import Activation


def scores_by_hand(hidden_TD: np.ndarray, router_DE: np.ndarray, bias_E: np.ndarray | None, *, score: str):
    logits_TE = hidden_TD.astype(np.float64) @ router_DE.astype(np.float64) + (0 if bias_E is None else bias_E)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits_TE))
    shares_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return shares_TE / shares_TE.sum(axis=1, keepdims=True)


def choice_by_hand(scores_TE: np.ndarray, bias_E: np.ndarray | None, *, router: RouterSpec) -> np.ndarray:
    """What experts are chosen by; -inf outside of the groups that a token keeps."""
    choice_TE = scores_TE + (0 if bias_E is None else bias_E)
    members = np.split(np.arange(router.num_experts), router.num_groups)
    num_best = {"max": 1, "top2_sum": 2}[router.group_score]
    for row in choice_TE:
        worth = [sum(sorted(row[group])[-num_best:]) for group in members]
        for group in sorted(range(len(members)), key=lambda group: -worth[group])[router.groups_kept :]:
            row[members[group]] = -np.inf
    return choice_TE


def gates_by_hand(scores_TE: np.ndarray, ids_TK: np.ndarray, *, router: RouterSpec) -> np.ndarray:
    gates_TK = np.where(ids_TK >= 0, np.take_along_axis(scores_TE, np.maximum(ids_TK, 0), axis=1), 0)
    if router.renormalize:
        gates_TK /= np.maximum(gates_TK.sum(axis=1, keepdims=True), max(router.renormalize_floor, 1e-30))
    return gates_TK * router.scale


def activation_by_hand(gate: np.ndarray, up: np.ndarray, *, activation: Activation) -> np.ndarray:
    name, slope, limit = activation
    if name == "clamped_swiglu":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-slope * gate)) * (up + 1)
    if name == "clipped_silu":
        return np.minimum(gate / (1 + np.exp(-gate)), limit) * np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up
