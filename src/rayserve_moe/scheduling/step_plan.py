"""What the engine tells the devices to compute in one step, and what comes back.

Both are small frozen records of numpy arrays: they travel to every host each step, so a plan holds only what
changed. A plan without chunks computes nothing and only collects routing rows that are still on the device.

A chunk is a run of tokens of one sequence: `chunk_rows[c]` is its row, its tokens sit at positions
`chunk_starts[c] .. chunk_starts[c] + chunk_lengths[c] - 1`, and the tokens of all chunks follow each other in
`token_ids`. Where `chunk_samples[c]`, the chunk ends at the last known token and the next one is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PREFILL_BLOCK_TOKENS = 32
"""Chunks of more than one token take up whole blocks of this many tokens in a step."""


def _empty(dtype: type, columns: int | None = None) -> np.ndarray:
    return np.zeros((0,) if columns is None else (0, columns), dtype)


@dataclass(frozen=True)
class PageTableChanges:
    """Entries to set: row `rows[i]` keeps page `page_ids[i]` at index `indices[i]`. All int32 [P]."""

    rows: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    indices: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    page_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of rows taken by new sequences.

    `rows` int32 [S]; `floats` float32 [S, 3] = temperature, top_p, min_p; `integers` uint32 [S, 3] = top_k,
    seed, choice index.
    """

    rows: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    floats: np.ndarray = field(default_factory=lambda: _empty(np.float32, 3))
    integers: np.ndarray = field(default_factory=lambda: _empty(np.uint32, 3))


@dataclass(frozen=True)
class StepPlan:
    """One step for all hosts. `wants_routing` says that some row of this step will be asked for."""

    step_id: int
    chunk_rows: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    chunk_starts: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    chunk_lengths: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    token_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    chunk_samples: np.ndarray = field(default_factory=lambda: _empty(np.bool_))
    pages: PageTableChanges = field(default_factory=PageTableChanges)
    sampling: RowSampling = field(default_factory=RowSampling)
    wants_routing: bool = False

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class RoutingRows:
    """Routing of the step `step_id`: [num_tokens, MoE layers, k], tokens in the order of that step's plan."""

    step_id: int
    rows: np.ndarray


@dataclass(frozen=True)
class StepTimes:
    """Seconds the host of rank 0 spent on one step."""

    pack_s: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What a step sampled: per chunk a token id (-1 where none), its log-prob, and whether its logits were finite.

    `routing` holds rows of an earlier step, where some were wanted and are due.
    """

    step_id: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray
    routing: RoutingRows | None = None
    times: StepTimes = StepTimes()
