"""What is fixed about the MoE layers of a model when a step is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class ExpertRule:
    """How experts are chosen, computed, and spread over devices.

    `kernel` names the grouped product, `backend` how tokens and experts meet (`auto`: by the number of tokens),
    `slot_choice` which of an expert's slots a token takes. `selection` is `topk`, `replicas_only` or `balanced`; where
    slots have limited room, `capacity_scope` says among whom (see `balanced_layer`).
    """

    num_experts: int
    top_k: int
    renormalize: bool
    kernel: str
    plan: ParallelPlan
    num_redundant: int = 0
    backend: str = "auto"
    slot_choice: str = "shares"
    selection: str = "replicas_only"
    capacity_scope: str = "global"

    @property
    def num_slots(self) -> int:
        """Expert slots of a layer over all devices."""
        return self.num_experts + self.num_redundant

    @property
    def limits_room(self) -> bool:
        """Whether slots take only so many tokens: then they are chosen together with experts, by all who compete."""
        return self.selection == "balanced" or (self.selection, self.slot_choice) == ("replicas_only", "capacity")

    @property
    def num_local_slots(self) -> int:
        return self.num_slots // self.plan.num_expert_ranks
