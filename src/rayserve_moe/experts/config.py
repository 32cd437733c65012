"""What is fixed about the MoE layers of a model when a step is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.table import Kernels
from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class ExpertConfig:
    """How experts are chosen, computed, and spread over devices.

    A layer has `num_redundant` expert slots more than experts. `backend` names how tokens and experts meet (`auto`: by
    the number of tokens), `slot_choice` which of an expert's slots a token takes. `selection` is `topk`,
    `replicas_only` or `balanced`; where slots have limited capacity, `capacity_scope` says which tokens compete (see
    `balanced_layer`). `activation` is one of `expert_products.ACTIVATIONS`. `weight_dtype` is `int8` or
    `float8_e4m3fn` where the matrices of experts are quantised; empty: they are as all weights.
    """

    router: RouterSpec
    kernels: Kernels
    plan: ParallelPlan
    num_redundant: int = 0
    backend: str = "auto"
    slot_choice: str = "shares"
    selection: str = "replicas_only"
    capacity_scope: str = "global"
    activation: str = "silu"
    weight_dtype: str = ""

    @property
    def num_slots(self) -> int:
        """Expert slots of a layer over all devices."""
        return self.router.num_experts + self.num_redundant

    @property
    def limits_capacity(self) -> bool:
        """Whether slots take only so many tokens: then they are chosen together with experts, by all that compete."""
        return self.selection == "balanced" or (self.selection, self.slot_choice) == ("replicas_only", "capacity")

    @property
    def num_local_slots(self) -> int:
        return self.num_slots // self.plan.num_expert_ranks
