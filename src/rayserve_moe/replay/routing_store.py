"""The host cache of routing rows, indexed by KV slot: a row lives and dies with the KV it belongs to."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import RoutingLayout


class RoutingStore:
    """One row per KV slot, each with the stamp of the page allocation it was written for.

    A reader names the stamp it expects; a row written for anyone else is missing to it, never wrong.
    """

    def __init__(self, layout: RoutingLayout, *, num_slots: int) -> None:
        self._rows = np.zeros((num_slots, *layout.row_shape), layout.dtype)
        self._stamps = np.zeros(num_slots, np.int64)

    def write(self, slots: np.ndarray, stamps: np.ndarray, *, rows: np.ndarray) -> None:
        """Put rows [N, M, K] at `slots` int [N], under `stamps` int64 [N] (above 0)."""
        self._rows[slots] = rows
        self._stamps[slots] = stamps

    def read(self, slots: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fetch rows [N, M, K] and which of them are present, bool [N]; absent rows are zeros."""
        present = self._stamps[slots] == stamps
        rows = self._rows[slots]
        rows[~present] = 0
        return rows, present
