"""From the routing ids of a step, as they leave the device, to rows in the order of the plan."""

from __future__ import annotations

import jax
import numpy as np

from rayserve_moe.scheduling.step_plan import RoutingRows


def routing_rows(step_id: int, topk_ids_MTK: jax.Array, *, token_places: np.ndarray) -> RoutingRows:
    """Take the rows [tokens, M, K] of the plan's tokens; `token_places` says where they stand in T."""
    rows = np.asarray(topk_ids_MTK)[:, token_places].transpose(1, 0, 2)
    return RoutingRows(step_id, np.ascontiguousarray(rows))
