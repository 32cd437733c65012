"""Constants of the MoE layers of a model in a compiled step."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.activations import SILU, Activation
from rayserve_moe.kernels.reference.expert_products import ProductConfig
from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class ExpertConfig:
    """The choice of experts, their computation, and their distribution over devices."""

    router: RouterSpec
    kernels: Kernels
    plan: ParallelPlan
    num_redundant: int = 0
    """Number of expert slots of a layer beyond its experts."""
    backend: str = "auto"
    """Name of an expert backend (`backends.EXPERT_BACKENDS`); `auto`: the first that supports a step."""
    slot_choice: str = "shares"
    """Rule by which a token takes a slot of its expert (`slot_mapping`)."""
    selection: str = "replicas_only"
    """`topk`, `replicas_only` or `balanced`."""
    capacity_scope: str = "global"
    """The tokens that compete for slots of limited capacity (`balanced_layer`)."""
    activation: Activation = SILU
    weight_dtype: str = ""
    """`int8` or `float8_e4m3fn` for quantised matrices of experts; empty: the dtype of all weights."""
    narrows_rows: bool = False
    """True if rows are rounded to e4m3 for products with experts in e4m3."""

    @property
    def num_slots(self) -> int:
        """Return the number of expert slots of a layer over all devices."""
        return self.router.num_experts + self.num_redundant

    @property
    def limits_capacity(self) -> bool:
        """Return True if slots have limited capacity; they are then chosen together with experts."""
        return self.selection == "balanced" or (self.selection, self.slot_choice) == ("replicas_only", "capacity")

    @property
    def num_local_slots(self) -> int:
        return self.num_slots // self.plan.num_expert_ranks

    def product(self, mean_rows: float) -> ProductConfig:
        """Return the constants of a product of a device's experts, given the mean rows of an expert."""
        return ProductConfig(self.num_local_slots, mean_rows, self.activation, self.narrows_rows)
