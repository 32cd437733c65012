"""The host cache of routing rows, indexed by slot: a row lives as long as the page that its sequence holds.

Layers with a window may have freed their keys and values of that page long before.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayserve_moe.replay.index_rows import IndexStore
from rayserve_moe.requests.records import RoutingLayout


class RoutingStore:
    """A row per slot, each with the stamp of the page allocation it was written for.

    A reader passes the expected stamp; a row written under another stamp is reported missing, never wrong. The stored
    stamp includes the slot, so a row moved to another slot is missing there. Each row has the version of the weights
    that it was computed under, a number that only its writer interprets.

    With `max_index_bytes`, packed index rows are stored beside them, and the oldest are dropped beyond that size.
    """

    def __init__(self, layout: RoutingLayout, *, num_slots: int, max_index_bytes: int = 0) -> None:
        self._index = IndexStore(max_bytes=max_index_bytes) if max_index_bytes else None
        self._rows = np.zeros((num_slots, *layout.row_shape), layout.dtype)
        self._stamps = np.zeros(num_slots, np.int64)
        self._versions = np.zeros(num_slots, np.int32)

    def write(
        self,
        slots: np.ndarray,
        stamps: np.ndarray,
        *,
        rows: np.ndarray,
        versions: np.ndarray | int = 0,
        index: Iterable[bytes | None] | None = None,
    ) -> None:
        """Store rows [N, M, K] at `slots` int [N], under `stamps` int64 [N] (above 0), and packed index rows [N]."""
        if self._index is not None:
            self._index.write(slots, [None] * len(slots) if index is None else index)
        self._rows[slots] = rows
        self._stamps[slots] = self._kept(slots, stamps)
        self._versions[slots] = versions

    def read(self, slots: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows [N, M, K] and the mask of present rows, bool [N]; absent rows are zeros."""
        present = self._stamps[slots] == self._kept(slots, stamps)
        rows = self._rows[slots]
        rows[~present] = 0
        return rows, present

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """Return the versions int32 [N] of the rows at `slots`; only valid for present rows."""
        return self._versions[slots]

    def index(self, slots: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        """Return packed index rows, object [N], None for rows that are not `present`; None if they are not stored."""
        if self._index is None:
            return None
        found = self._index.read(slots)
        found[~present] = None
        return found

    def _kept(self, slots: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        return stamps * len(self._stamps) + slots
