"""Bringing routing ids from the device to the host in the shadow of the next step."""

from __future__ import annotations

import jax
import numpy as np

from rayserve_moe.scheduling.step_plan import RoutingRows


class RoutingTransfer:
    """Holds the routing of at most one step while its copy to the host is under way."""

    def __init__(self) -> None:
        self._pending: tuple[int, jax.Array, np.ndarray] | None = None

    def start(self, step_id: int, topk_ids_MTK: jax.Array, *, token_places: np.ndarray) -> None:
        """Begin the copy of a step's routing; `token_places` are the rows of T that hold real tokens."""
        assert self._pending is None, "routing of the last step was not collected"
        topk_ids_MTK.copy_to_host_async()
        self._pending = (step_id, topk_ids_MTK, token_places)

    def collect(self) -> RoutingRows | None:
        """Hand over the pending rows as [tokens, M, K], or None where there are none."""
        if self._pending is None:
            return None
        step_id, topk_ids_MTK, token_places = self._pending
        self._pending = None
        rows = np.asarray(topk_ids_MTK)[:, token_places].transpose(1, 0, 2)
        return RoutingRows(step_id, np.ascontiguousarray(rows))
