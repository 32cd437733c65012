"""What an arm of the ablation replays: the rows that were served, none, or wrong ones as controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from examples.grpo.batch import Batch

FreeRows = Callable[[], np.ndarray]
"""Rows [B, T, L, K] that the version before chooses for the same tokens."""
Arm = Callable[[Batch, np.random.Generator, FreeRows], Batch]


def _off(batch: Batch, generator: np.random.Generator, earlier: FreeRows) -> Batch:
    return replace(batch, replay_BT=np.zeros_like(batch.replay_BT))


def _stale(batch: Batch, generator: np.random.Generator, earlier: FreeRows) -> Batch:
    return replace(batch, rows_BTLK=np.where(batch.replay_BT[..., None, None], earlier(), batch.rows_BTLK))


def _shifted_prompt(batch: Batch, generator: np.random.Generator, earlier: FreeRows) -> Batch:
    return replace(batch, rows_BTLK=np.where(batch.prompt_BT[..., None, None], shifted(batch), batch.rows_BTLK))


def _permuted(batch: Batch, generator: np.random.Generator, earlier: FreeRows) -> Batch:
    rows = batch.rows_BTLK.copy()
    for sample, has_row in zip(rows, batch.replay_BT, strict=True):
        sample[has_row] = generator.permutation(sample[has_row])
    return replace(batch, rows_BTLK=rows)


def shifted(batch: Batch, by: int = 1) -> np.ndarray:
    """Rows of the position `by` before each one (after it, where negative); the one without is left its own."""
    rows = np.roll(batch.rows_BTLK, by, axis=1)
    rows[:, 0 if by > 0 else -1] = batch.rows_BTLK[:, 0 if by > 0 else -1]
    return rows


def _wholly_shifted(batch: Batch, generator: np.random.Generator, earlier: FreeRows) -> Batch:
    return replace(batch, rows_BTLK=shifted(batch))


ARMS: dict[str, Arm] = {
    "replay": lambda batch, generator, earlier: batch,
    "free": _off,
    "stale": _stale,
    "shifted": _shifted_prompt,
    "permuted": _permuted,
}
"""By name: what is replayed. `stale` has the rows of the version before under the label of the one that sampled,
`shifted` those of the position before inside the prompt, `permuted` those of random positions of the sample."""

CONTROLS: dict[str, Arm] = {
    "wholly shifted": _wholly_shifted,
    "shifted in the prompt": _shifted_prompt,
    "stale": _stale,
}
"""By name: wrong rows that are only scored, to see which of them the guard would refuse."""
