"""Index rows of sparse attention in compact form: the positions that each index chose for a token, as bytes.

Positions ascend, so that a token keeps their differences: a byte each, and four for the few larger ones. Positions 0, 1
.. without a gap, which contexts within the choice have, take no bytes besides their count.

    int32 [I] counts, negative without gaps | uint8 gaps of all layers | uint32 gaps of 255 and more, in order
"""

from __future__ import annotations

import numpy as np

LARGE = 255
"""Gap that stands for one of the larger gaps behind."""
NONE = -1
"""Position of no token."""


def packed_index(chosen_NIK: np.ndarray) -> np.ndarray:
    """Return the bytes of each token, object [N]; positions ascend with -1 behind, int32."""
    found = np.empty(len(chosen_NIK), object)
    counts_NI = (chosen_NIK >= 0).sum(-1, dtype=np.int32)
    last_NI = np.take_along_axis(chosen_NIK, np.maximum(counts_NI - 1, 0)[..., None], axis=-1)[..., 0]
    is_whole_NI = last_NI == counts_NI - 1
    heads_NI = np.where(is_whole_NI, -counts_NI, counts_NI).astype("<i4")
    for token, head_I in enumerate(heads_NI):
        gaps_IK = chosen_NIK[token].copy()
        gaps_IK[:, 1:] -= chosen_NIK[token, :, :-1] + 1
        parts = [gaps_K[: max(head, 0)] for gaps_K, head in zip(gaps_IK, head_I.tolist(), strict=True)]
        gaps = gaps_IK.ravel() if (head_I == gaps_IK.shape[1]).all() else np.concatenate(parts)
        large = gaps[gaps >= LARGE].astype("<u4")
        found[token] = head_I.tobytes() + np.minimum(gaps, LARGE).astype(np.uint8).tobytes() + large.tobytes()
    return found


def unpacked_index(packed: bytes, *, num_layers: int, top_k: int) -> np.ndarray:
    """Return the positions of a token, int32 [I, K]: ascending with -1 behind."""
    heads = np.frombuffer(packed, "<i4", num_layers)
    num_gaps = int(heads[heads > 0].sum())
    gaps = np.frombuffer(packed, np.uint8, num_gaps, 4 * num_layers).astype(np.int64)
    gaps[gaps == LARGE] = np.frombuffer(packed, "<u4", offset=4 * num_layers + num_gaps)
    found, first = np.full((num_layers, top_k), NONE, np.int32), 0
    for positions_K, head in zip(found, heads.tolist(), strict=True):
        if head <= 0:
            positions_K[:-head] = np.arange(-head)
        else:
            positions_K[:head] = np.cumsum(gaps[first : first + head] + 1) - 1
            first += head
    return found


def unpacked_rows(packed: np.ndarray, *, num_layers: int, top_k: int) -> np.ndarray:
    """Return the positions of tokens, int32 [N, I, K]; -1 for a token whose packed row is None."""
    rows = np.full((len(packed), num_layers, top_k), NONE, np.int32)
    for place, row in enumerate(packed):
        if row is not None:
            rows[place] = unpacked_index(row, num_layers=num_layers, top_k=top_k)
    return rows


def check_packed(packed: bytes, *, num_layers: int, top_k: int) -> None:
    """Raise ValueError unless bytes from outside are a packed row with 1 to `top_k` positions for each index."""
    if len(packed) < 4 * num_layers:
        raise ValueError("a packed row is shorter than its counts")
    counts = np.frombuffer(packed, "<i4", num_layers).astype(np.int64)
    if not ((np.abs(counts) >= 1) & (np.abs(counts) <= top_k)).all():
        raise ValueError(f"a packed row must hold 1 to {top_k} positions for each index")
    num_gaps, first = int(counts[counts > 0].sum()), 4 * num_layers
    large = np.frombuffer(packed[first : first + num_gaps], np.uint8) == LARGE
    if len(packed) != first + num_gaps + 4 * int(large.sum()):
        raise ValueError("a packed row has another length than its counts say")


class IndexStore:
    """Packed index rows by slot, within a number of bytes: the oldest are dropped, and missing from then on."""

    def __init__(self, *, max_bytes: int) -> None:
        self._rows: dict[int, bytes] = {}
        """Rows by slot, the oldest first."""
        self._max_bytes, self.num_bytes = max_bytes, 0
        """Maximum bytes, and bytes of all rows."""

    def write(self, slots: np.ndarray, entries: np.ndarray | None) -> None:
        """Store the rows of `slots`, object [N] with None for a row that is not known; None if none is."""
        rows = [None] * len(slots) if entries is None else entries
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self._drop(slot)
            if row is not None:
                self._rows[slot] = row
                self.num_bytes += len(row)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._rows)))

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows of `slots`, object [N]; None where none is stored."""
        found = np.empty(len(slots), object)
        found[:] = [self._rows.get(slot) for slot in slots.tolist()]
        return found

    def _drop(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        self.num_bytes -= 0 if row is None else len(row)
