"""Settings of other engines that have no counterpart here, and the sentence that answers each of them."""

from __future__ import annotations

_HEADS = (
    "attention heads are split over all devices of a data-parallel group by themselves: set data_parallel_size (the "
    "groups), and devices_per_host for fewer devices"
)
_EXPERTS = "experts always lie over all devices: leave it out"
EXPLAINED = {
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "attention_tp_size"), _HEADS),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "enable_expert_parallel", "moe_tp_size"), _EXPERTS),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size"), "layers are not split into stages here: leave it out"),
}
"""Settings of other engines that have no counterpart, and what to do instead. 1 is what a single device does anyway."""
