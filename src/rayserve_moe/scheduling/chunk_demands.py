"""Extra work of chunks that must use prefill blocks at any length: forced routing, or a token probe."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.columns import ragged
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.scheduling.step_plan import BlockWork
from rayserve_moe.scheduling.token_probe import PromptProbe


class ChunkDemand(NamedTuple):
    """Extra work of a chunk."""

    start: int
    """Position of the chunk's first token."""
    forced_from: int = 0
    """Position of the first forced row."""
    forced_rows: np.ndarray | None = None
    """Experts of consecutive positions; None without forced routing."""
    forced_index: np.ndarray | None = None
    """Packed index rows of the same positions, object; None without forced choices of an index."""


def demand_of(start: int, stop: int, *, probe: PromptProbe | None, forced: RoutedExperts | None) -> ChunkDemand | None:
    """Return the extra work of a chunk over positions `[start, stop)`, or None."""
    if forced is not None:
        first, last = max(start, forced.start), min(stop, forced.start + len(forced.rows))
        if first < last:
            part = slice(first - forced.start, last - forced.start)
            index = None if forced.index is None else forced.index[part]
            return ChunkDemand(start, first, forced.rows[part], index)
    return ChunkDemand(start) if probe is not None and probe.needs_block(start, stop) else None


def block_work_of(demands: list[tuple[ChunkDemand | None, np.ndarray, np.ndarray]]) -> BlockWork:
    """Join the extra work of a plan's chunks.

    Each entry holds a demand, the table rows of the chunks it belongs to, and their tokens.
    """
    chunks, forced_tokens, forced_rows, index_rows = [], [np.zeros(0, np.intp)], [], []
    first_chunk = first_token = 0
    for demand, rows_of_chunks, token_ids in demands:
        if demand is not None:
            chunks.append(first_chunk)
        if demand is not None and demand.forced_rows is not None:
            rows = demand.forced_rows
            forced_tokens.append(first_token + demand.forced_from - demand.start + np.arange(len(rows)))
            forced_rows.append(rows)
            index = [b""] * len(rows) if demand.forced_index is None else demand.forced_index
            index_rows += (np.frombuffer(row, np.uint8) for row in index)
        first_chunk, first_token = first_chunk + len(rows_of_chunks), first_token + len(token_ids)
    return BlockWork(
        np.asarray(chunks, np.intp),
        np.concatenate(forced_tokens),
        forced_rows=np.concatenate(forced_rows) if forced_rows else None,
        forced_index=ragged(index_rows, np.uint8) if any(map(len, index_rows)) else None,
    )
