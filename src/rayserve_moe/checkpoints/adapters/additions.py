"""Low-rank additions to the tensors of a checkpoint: W0 + s B A, rounded once."""

# N experts, or 1 if all share a matrix   R rank   I inputs   O outputs

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.checkpoints.casting import cast, is_finite
from rayserve_moe.checkpoints.header import CheckpointError

_WIDE = np.dtype(np.float64)


@dataclass(frozen=True)
class Addition:
    """The product s B A that is added to a tensor of a checkpoint, or to some of its rows."""

    a_NRI: np.ndarray
    b_NOR: np.ndarray
    scale: float
    rows: np.ndarray | None = None
    """Index of each output among the outputs of the tensor, ascending; None if the tensor has no other outputs."""
    expert: int | None = None
    """The expert of a tensor of all experts; None for all of them."""
    is_in_out: bool = False
    """True if the tensor is [in, out]."""

    def add_to(self, values: np.ndarray, index: Sequence[tuple[int, int]]) -> None:
        """Add the product to a block `[from, to)` of the tensor, float64 [experts, out, in] or [experts, in, out]."""
        (first, end), *within = index
        (out_start, out_end), (in_start, in_end) = within[::-1] if self.is_in_out else within
        rows = slice(out_start, out_end)
        places: slice | np.ndarray = slice(None)
        if self.rows is not None:
            held = np.flatnonzero((self.rows >= out_start) & (self.rows < out_end))
            if not held.size:
                return
            rows, places = held, self.rows[held] - out_start
        for expert in range(first, end) if self.expert is None else (self.expert,):
            if first <= expert < end:
                at = 0 if self.expert is not None else expert
                b_OR = cast(self.b_NOR[at % len(self.b_NOR)][rows], np.dtype(np.float32)).astype(_WIDE)
                a_RI = cast(self.a_NRI[at % len(self.a_NRI)][:, in_start:in_end], np.dtype(np.float32)).astype(_WIDE)
                block = values[expert - first].T if self.is_in_out else values[expert - first]
                block[places] += (b_OR * self.scale) @ a_RI


class MergedTensors:
    """The additions to the tensors of a checkpoint, by name, and the largest error of their rounding so far.

    Sums are computed in float64, so that their values do not depend on how a tensor is cut.
    """

    def __init__(self, additions: Mapping[str, Sequence[Addition]], dtypes: Mapping[str, np.dtype]) -> None:
        self._additions, self._dtypes = additions, dtypes
        self._recording = threading.Lock()
        self.max_rounding = 0.0
        """Largest |round(W) - W| of the blocks that were read, in the dtype that the server holds them in."""

    def merged(self, name: str, values: np.ndarray, *, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return a block of a tensor with its additions, float32; tensors without additions pass unchanged.

        `index` is `[from, to)` of each of the tensor's dimensions. Raises CheckpointError for a sum that is not finite.
        """
        additions = self._additions.get(name, ())
        if not additions or not values.size:
            return values
        wide = cast(values, np.dtype(np.float32)).astype(_WIDE)
        block, bounds = (wide[None], [(0, 1), *index]) if values.ndim == 2 else (wide, index)
        with np.errstate(over="ignore", invalid="ignore"):
            for each in additions:
                each.add_to(block, bounds)
            merged = wide.astype(np.float32)
            held = cast(cast(merged, self._dtypes[name]), np.dtype(np.float32))
        if not is_finite(held):
            raise CheckpointError(f"{name} with its adapter is not finite in {self._dtypes[name]}")
        error = float(np.max(np.abs(held.astype(_WIDE) - wide)))
        with self._recording:
            self.max_rounding = max(self.max_rounding, error)
        return merged
