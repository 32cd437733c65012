"""A router as data: from logits to experts and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def one_of(default: Any, *others: Any) -> Any:
    """Return a field for a knob with the supported values `default` and `others`."""
    return field(default=default, metadata={"computed": (default, *others)})


@dataclass(frozen=True)
class RouterSpec:
    """From logits to experts and weights, always in float32.

    Logits (plus `logit_bias`) become scores by `score`: `softmax` or `sigmoid`. Scores plus `selection_bias` choose:
    with `num_groups` > 1 only within the `groups_kept` best groups by `group_score` (`max` or `top2_sum`), then the top
    k. Weights are the unbiased scores, with `renormalize` divided by their sum (by `renormalize_floor` if that is
    larger), times `scale`. A softmax over the chosen logits alone is `softmax` with `renormalize`.
    `selection_bias_in_row`: files hold it as [1, experts].
    """

    num_experts: int
    top_k: int
    renormalize: bool
    score: str = one_of("softmax", "sigmoid")
    logit_bias: bool = False
    selection_bias: bool = False
    num_groups: int = 1
    groups_kept: int = 1
    group_score: str = one_of("max", "top2_sum")
    renormalize_floor: float = 0.0
    scale: float = 1.0
    selection_bias_in_row: bool = False
    own_norm: bool = False
    """True if the router reads the residual stream by a norm of its own, False if it reads the experts' input."""
    expert_factors: bool = False
    """True if weights are multiplied by a factor of their expert, last of all."""

    def problem(self) -> str | None:
        """Return the reason against numbers that no router can have; None without a reason."""
        if self.top_k > self.num_experts:
            return f"num_experts_per_tok (moe_k, moe_topk) {self.top_k} exceeds {self.num_experts} experts"
        if not 1 <= self.groups_kept <= self.num_groups or self.num_experts % self.num_groups:
            return f"{self.groups_kept} of {self.num_groups} groups of {self.num_experts} experts cannot be kept"
        per_group = self.num_experts // self.num_groups
        num_left = self.groups_kept * per_group
        if self.top_k > num_left:
            return f"num_experts_per_tok {self.top_k} exceeds the {num_left} experts of the groups that are kept"
        if self.num_groups > 1 and self.group_score == "top2_sum" and per_group < 2:
            return f"groups of one expert have no top2_sum ({self.num_groups} groups)"
        return None
