"""Autoscaling by demand: each replica reports its demand, and Serve's controller asks this policy.

Behind HAProxy no requests queue at Serve's handles, so a policy that counts requests there sees no queue.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from rayserve_moe.config.derive import max_num_replicas
from rayserve_moe.config.replica_settings import ReplicaSettings
from rayserve_moe.engine.loop import EngineLoop

DEMAND = "demand"
_SAMPLED_S, _AVERAGED_S = 1.0, 5.0
"""Interval of a replica's samples and reports, and the time that Serve averages over; Serve's defaults react in a
minute.
"""


def demand_on(*, num_requests: int, max_requests: int, num_tokens: int, max_tokens: int) -> float:
    """Return a replica's demand, including waiting requests and prompt tokens, as a share of its capacity.

    The scarcer of rows and KV pages counts. Above 1 something waits.
    """
    return max(num_requests / max_requests, num_tokens / max_tokens)


def demand_of(loop: EngineLoop) -> float:
    """Return the current demand on a running engine."""
    pages, statistics = loop.control.pages, loop.statistics()
    num_requests, _ = pages.load()
    used = (statistics["pages_total"] - statistics["pages_free"]) * pages.page_size
    return demand_on(
        num_requests=num_requests,
        max_requests=pages.num_rows,
        num_tokens=int(used) + pages.tokens_without_pages(),
        max_tokens=int(statistics["pages_total"]) * pages.page_size,
    )


class ByDemand:
    """Serve's policy: the minimum replicas that bring the mean demand to `target`; no change while none reports."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, which Serve bounds and delays, and no state."""
        found = (context.aggregated_metrics or {}).get(DEMAND)
        if not found:
            return context.target_num_replicas, {}
        return math.ceil(sum(found.values()) / self._target - 1e-9), {}


def autoscaling_of(replicas: ReplicaSettings) -> AutoscalingConfig | None:
    """Return Serve's autoscaling settings, or None if the number of replicas is fixed.

    Serve calls the sampling interval deprecated, but has no other way to set it for a single deployment.
    """
    if not replicas.max_replicas:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            initial_replicas=replicas.num_replicas,
            min_replicas=replicas.min_replicas,
            max_replicas=max_num_replicas(replicas),
            metrics_interval_s=_SAMPLED_S,
            look_back_period_s=_AVERAGED_S,
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function=ByDemand, policy_kwargs={"target": replicas.target_demand}),
        )
