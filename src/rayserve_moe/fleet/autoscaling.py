"""How many replicas the demand on a fleet takes: each reports its own, and Serve's controller asks this policy.

Behind HAProxy nothing queues at Serve's handles, so a policy that counts requests there sees no queue.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from rayserve_moe.config.derive import max_num_replicas
from rayserve_moe.config.settings import ReplicaSettings
from rayserve_moe.engine.loop import EngineLoop

DEMAND = "demand"
_SAMPLED_S, _AVERAGED_S = 1.0, 5.0
"""A replica is sampled and reports as often, and Serve averages over as long: at its defaults a minute would pass."""


def demand_on(*, num_requests: int, most_requests: int, num_tokens: int, most_tokens: int) -> float:
    """Return what a replica is asked for, waiting requests and prompt tokens included, as a share of what it holds at a
    time: of its rows or of its pool of KV pages, whichever is the scarcer. Above 1 something waits."""
    return max(num_requests / most_requests, num_tokens / most_tokens)


def demand_of(loop: EngineLoop) -> float:
    """Return the demand on a running engine, as of about now."""
    pages, statistics = loop.control.pages, loop.statistics()
    num_requests, _ = pages.load()
    used = (statistics["pages_total"] - statistics["pages_free"]) * pages.page_size
    return demand_on(
        num_requests=num_requests,
        most_requests=pages.num_rows,
        num_tokens=int(used) + pages.tokens_without_pages(),
        most_tokens=int(statistics["pages_total"]) * pages.page_size,
    )


class ByDemand:
    """Serve's policy: as few replicas as bring their mean demand to `target`; the number stays while none reports."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, which Serve holds within its bounds and delays, and no state."""
        found = (context.aggregated_metrics or {}).get(DEMAND)
        if not found:
            return context.target_num_replicas, {}
        return math.ceil(sum(found.values()) / self._target - 1e-9), {}


def autoscaling_of(replicas: ReplicaSettings) -> AutoscalingConfig | None:
    """Return how Serve is to scale the deployment; None where the number of replicas is left alone.

    Serve calls the interval of samples deprecated, and has no other way to set it for one deployment.
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
