"""Settings for replicas behind one endpoint: their number, their roles, and autoscaling."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.setting_fields import number as _number


@dataclass(frozen=True)
class ReplicaSettings:
    """Number of replicas, and its autoscaling."""

    num_replicas: int = _number(1, (1, 4096))
    """Replicas at the start, each on its own hosts; `rayserve-moe scale` changes the number later."""
    num_prefill: int = _number(0, (0, 4095), "num_prefill_replicas")
    """Replicas that compute long prompts for the others, with pages in `host_cache_mib`. 0: every replica does both."""
    min_replicas: int = _number(1, (1, 4096))
    """Minimum number of replicas if `max_replicas` is set."""
    max_replicas: int = _number(0, (0, 4096))
    """Maximum number of replicas that autoscaling may start; 0 disables autoscaling."""
    target_demand: float = _number(0.7, (0.05, 1))
    """Target of the mean demand: used and requested rows or KV pages, divided by a replica's total."""
    upscale_delay_s: float = _number(3.0, (0, DAY_S))
    """Seconds of high demand before replicas are started."""
    downscale_delay_s: float = _number(300.0, (0, DAY_S))
    """Seconds of low demand before replicas drain and end."""
