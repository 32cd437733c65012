"""Extra work of chunks that must use prefill blocks at any length: forced routing, or a token probe."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.columns import Ragged, ragged
from rayserve_moe.requests.records import GATES, INDEX, RoutedExperts
from rayserve_moe.requests.row_parts import joined_parts, parts_between
from rayserve_moe.scheduling.step_plan import BlockWork
from rayserve_moe.scheduling.token_probe import PromptProbe


class ChunkDemand(NamedTuple):
    """Extra work of a chunk."""

    start: int
    """Position of the chunk's first token."""
    forced: RoutedExperts | None = None
    """Forced routing of consecutive positions of the chunk; None without any."""


def demand_of(start: int, stop: int, *, probe: PromptProbe | None, forced: RoutedExperts | None) -> ChunkDemand | None:
    """Return the extra work of a chunk over positions `[start, stop)`, or None."""
    if forced is not None:
        first, last = max(start, forced.start), min(stop, forced.start + len(forced.rows))
        if first < last:
            rows = forced.rows[first - forced.start : last - forced.start]
            return ChunkDemand(start, RoutedExperts(rows, first, parts=parts_between(forced, first, last=last)))
    return ChunkDemand(start) if probe is not None and probe.needs_block(start, stop) else None


def block_work_of(demands: list[tuple[ChunkDemand | None, np.ndarray, np.ndarray]]) -> BlockWork:
    """Join the extra work of a plan's chunks.

    Each entry holds a demand, the table rows of the chunks it belongs to, and their tokens.
    """
    chunks, forced_tokens, forced = [], [np.zeros(0, np.intp)], []
    first_chunk = first_token = 0
    for demand, rows_of_chunks, token_ids in demands:
        if demand is not None:
            chunks.append(first_chunk)
        if demand is not None and demand.forced is not None:
            given = demand.forced
            forced_tokens.append(first_token + given.start - demand.start + np.arange(len(given.rows)))
            forced.append(given)
        first_chunk, first_token = first_chunk + len(rows_of_chunks), first_token + len(token_ids)
    parts = joined_parts(forced)
    return BlockWork(
        np.asarray(chunks, np.intp),
        np.concatenate(forced_tokens),
        forced_rows=np.concatenate([each.rows for each in forced]) if forced else None,
        forced_index=_forced_index(parts.get(INDEX)),
        forced_gates=parts.get(GATES),
    )


def _forced_index(packed: np.ndarray | None) -> Ragged | None:
    if packed is None:
        return None
    return ragged((np.frombuffer(row or b"", np.uint8) for row in packed), np.uint8)
