"""The order in which the results of a token's experts are added up, the same in steps of all sizes.

Where large steps may take `device_sums`, every backend adds up as it does: results of a device in the order of slots,
in float32, rounded to the dtype of tokens; then the sums of devices in their order. Elsewhere results are added up in
router order, which no placement changes.
"""

from __future__ import annotations

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacedExperts
from rayserve_moe.experts.tokens import MIN_FUSED_CHUNK, RoutedTokens


def experts_may_move(experts: PlacedExperts, config: ExpertConfig) -> bool:
    """Return True if experts may move or have replicas: their results are then added up in router order."""
    return experts.maps is not None or config.slot_choice == CHOSEN_BEFORE or config.num_redundant > 0


def unsupported_kind(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why `device_sums` cannot take a call of any size; empty if it can."""
    if experts_may_move(experts, config):
        return "experts may move, and sums of devices depend on where experts are"
    if config.plan.num_slices > 1:
        return f"devices lie on {config.plan.num_slices} slices"
    return config.kernels.experts.device_sums.unsupported_reason(tokens.hidden_TD, experts.weights)


def adds_by_device(tokens: RoutedTokens, experts: PlacedExperts, config: ExpertConfig) -> bool:
    """Return True if every backend adds up in the order of this one, so that sums do not depend on a step's size."""
    if config.backend not in ("auto", "device_sums") or config.plan.num_expert_ranks == 1:
        return False
    if unsupported_kind(tokens, experts, config=config):
        return False
    return config.backend != "auto" or max_tokens(experts, config) >= MIN_FUSED_CHUNK


def max_tokens(experts: PlacedExperts, config: ExpertConfig) -> int:
    """Return the maximum number of tokens of a chunk, by the rows that a device can receive."""
    _, width, inner = experts.weights.up_XDF.shape
    max_rows = config.kernels.experts.device_sums.run.max_rows(width, inner, config.router.top_k)
    return max_rows // config.plan.num_expert_ranks
