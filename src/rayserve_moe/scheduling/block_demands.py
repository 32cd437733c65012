"""What is asked of a chunk besides computing it: scores of its prompt, routing forced upon it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.requests import RoutedExperts
from rayserve_moe.scheduling.prompt_scoring import PromptScoring
from rayserve_moe.scheduling.step_plan import BlockWork

NO_TARGETS = np.zeros(0, np.int32)


class ChunkDemand(NamedTuple):
    """What is asked of the chunk that begins at position `start`.

    `targets` are scored after positions `scored_from ...`, `forced_rows` apply from position `forced_from` on.
    """

    start: int
    scored_from: int = 0
    targets: np.ndarray = NO_TARGETS
    forced_from: int = 0
    forced_rows: np.ndarray | None = None


def demand_of(
    start: int, stop: int, *, scoring: PromptScoring | None, forced: RoutedExperts | None
) -> ChunkDemand | None:
    """What a sequence asks of a chunk over positions `[start, stop)`; None where that is nothing."""
    demand = ChunkDemand(start)
    if scoring is not None:
        scored_from, targets = scoring.targets(start, stop)
        demand = demand._replace(scored_from=scored_from, targets=targets)
    if forced is not None:
        first, last = max(start, forced.start), min(stop, forced.start + len(forced.rows))
        if first < last:
            rows = forced.rows[first - forced.start : last - forced.start]
            demand = demand._replace(forced_from=first, forced_rows=rows)
    return demand if len(demand.targets) or demand.forced_rows is not None else None


def block_work_of(demands: list[tuple[ChunkDemand | None, int, int]]) -> BlockWork:
    """Join demands to what a plan asks; with each come the numbers of chunks and tokens that it stands for."""
    chunks, score_tokens, targets = [], [np.zeros(0, np.intp)], [NO_TARGETS]
    forced_tokens, forced_rows = [np.zeros(0, np.intp)], []
    first_chunk = first_token = 0
    for demand, num_chunks, num_tokens in demands:
        if demand is not None:
            chunks.append(first_chunk)
            score_tokens.append(first_token + demand.scored_from - demand.start + np.arange(len(demand.targets)))
            targets.append(demand.targets)
        if demand is not None and demand.forced_rows is not None:
            rows = demand.forced_rows
            forced_tokens.append(first_token + demand.forced_from - demand.start + np.arange(len(rows)))
            forced_rows.append(rows)
        first_chunk, first_token = first_chunk + num_chunks, first_token + num_tokens
    return BlockWork(
        np.asarray(chunks, np.intp),
        np.concatenate(score_tokens),
        np.concatenate(targets),
        np.concatenate(forced_tokens),
        forced_rows=np.concatenate(forced_rows) if forced_rows else None,
    )
