"""Settings of LoRA adapters that are computed beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.config.setting_fields import named, number

RANK_MULTIPLE = 8
MAX_PER_STEP = 8
"""Default maximum number of adapters of a step."""


@dataclass(frozen=True)
class AdapterSettings:
    """LoRA adapters that requests name, computed beside the weights (docs/lora.md)."""

    num_slots: int = number(0, (0, 1024), "max_loras")
    """Adapters resident on the devices: at most that many run at once. 0: a load merges a single adapter into the
    weights instead."""
    max_rank: int = number(16, (1, 512), "max_lora_rank")
    """Maximum rank of an adapter. All take the memory and the time of this rank, as a multiple of 8."""
    per_step: int = number(0, (0, 1024), "adapters_per_step")
    """Maximum adapters of a data rank in a step; requests of others wait. Every step with adapters reads this many.
    0: `max_loras`, at most 8."""
    num_held: int = number(64, (1, 65536), "max_cpu_loras")
    """Maximum adapters in host memory. A further load drops the least recently used adapter without requests."""

    experts: bool = named(False, "lora_experts")
    """Adapters may also change routed experts. Each resident adapter then takes memory for all experts, and experts
    multiply by all `max_loras` adapters in every step with adapters."""
    shares_outer: bool = named(False, "lora_shared_outer")
    """Adapters of experts share A of gate and up, and B of down, over the experts of a layer, as Tinker's do. A server
    holds and multiplies these once per layer, and rejects other adapters of experts."""

    @property
    def compiled_rank(self) -> int:
        """Return the rank that programs are compiled for."""
        return -(-self.max_rank // RANK_MULTIPLE) * RANK_MULTIPLE

    @property
    def num_per_step(self) -> int:
        """Return the maximum number of adapters of a data rank in a step; 0 on a server without."""
        return min(self.per_step or MAX_PER_STEP, self.num_slots)
