"""The host cache of routing rows, indexed by slot: a row lives as long as the page that its sequence holds.

Layers with a window may have freed their keys and values of that page long before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.requests.row_parts import unknown_of


class PartStore(Protocol):
    """Entries of a part of routing rows (`requests.row_parts`), by slot."""

    def write(self, slots: np.ndarray, entries: np.ndarray | None) -> None:
        """Store the entries of `slots`, int [N]; None if they are not known."""

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Return the entries of `slots`; unknown where none is stored."""


class GateStore:
    """Router gates by slot, in an array of fixed size: 4 bytes per gate."""

    def __init__(self, layout: RoutingLayout, *, num_slots: int) -> None:
        self._gates = np.zeros((num_slots, *layout.row_shape), np.float32)
        """Entries of slots that were never written are read for missing rows alone."""

    def write(self, slots: np.ndarray, entries: np.ndarray | None) -> None:
        """Store the gates [N, M, K] of `slots`, int [N]; None if they are not known."""
        self._gates[slots] = np.nan if entries is None else entries

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Return the gates of `slots`, float32 [N, M, K]."""
        return self._gates[slots]


class RoutingStore:
    """A row per slot, each with the stamp of the page allocation it was written for.

    A reader passes the expected stamp; a row written under another stamp is reported missing, never wrong. The stored
    stamp includes the slot, so a row moved to another slot is missing there. Each row has the version of the weights
    that it was computed under, a number that only its writer interprets.

    `parts` store parts of the rows beside them.
    """

    def __init__(self, layout: RoutingLayout, *, num_slots: int, parts: Mapping[str, PartStore] | None = None) -> None:
        self._parts = dict(parts or {})
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
        parts: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Store rows [N, M, K] at `slots` int [N], under `stamps` int64 [N] (above 0), and their parts by name."""
        for name, store in self._parts.items():
            store.write(slots, None if parts is None else parts.get(name))
        self._rows[slots] = rows
        self._stamps[slots] = self._kept(slots, stamps)
        self._versions[slots] = versions

    def read(
        self, slots: np.ndarray, stamps: np.ndarray, *, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows [N, M, K] and the mask of present rows, bool [N]; absent rows are zeros.

        The rows are written to `out` if it is given, without another copy of them.
        """
        present = self._stamps[slots] == self._kept(slots, stamps)
        # The line above raises for slots that do not exist. With mode "raise", numpy copies through a buffer.
        rows = self._rows.take(slots, axis=0, out=out, mode="clip")
        rows[~present] = 0
        return rows, present

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """Return the versions int32 [N] of the rows at `slots`; only valid for present rows."""
        return self._versions[slots]

    def parts(self, slots: np.ndarray, present: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts of rows by name, without those that are not `present`."""
        found = {name: store.read(slots) for name, store in self._parts.items()}
        for values in found.values():
            values[~present] = unknown_of(values)
        return found

    def _kept(self, slots: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        return stamps * len(self._stamps) + slots
