"""What a chunk has to do besides computing its tokens: scores of its prompt, and forced routing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.records import GenerationRequest, PromptScores, RoutedExperts, TopLogprobs
from rayserve_moe.scheduling.step_plan import BlockWork

NO_TARGETS = np.zeros(0, np.int32)


class PromptScoring:
    """The prompt scores of a request found so far, shared by its choices and kept across preemptions.

    The token at position i is scored where the one before it is computed. `frontier` is the first position that still
    has to be computed for that: a cached prefix may reach up to it. All scores are of the weights `weight_version`.
    """

    def __init__(self, request: GenerationRequest, *, num_top: int = 0, weight_version: str = "") -> None:
        assert request.score_prompt_from is not None, "nothing is to be scored"
        self._prompt_ids = np.asarray(request.prompt_ids, np.int32)
        self._first = request.score_prompt_from
        count = len(self._prompt_ids) - 1 - self._first
        self._logprobs = np.zeros(count, np.float32)
        self._ranks = np.zeros(count, np.int32)
        self._top = TopLogprobs(np.zeros((count, num_top), np.int32), np.zeros((count, num_top), np.float32))
        self._is_found = np.zeros(count, np.bool_)
        self._weight_version = weight_version

    @property
    def wants_top(self) -> bool:
        return self._top.token_ids.shape[1] > 0

    @property
    def is_complete(self) -> bool:
        return bool(self._is_found.all())

    @property
    def frontier(self) -> int:
        return self._first + self._num_found

    def targets(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """What a chunk over positions `[start, stop)` has to score: the first position to score after, and the tokens
        at the positions that follow, int32."""
        first, last = max(start, self.frontier), min(stop, len(self._prompt_ids) - 1)
        return first, self._prompt_ids[first + 1 : max(first, last) + 1]

    def take(self, first: int, logprobs: np.ndarray, *, ranks: np.ndarray, top: TopLogprobs | None) -> None:
        """Store the scores of the targets after positions `first ...`; `top` [N, n or more] where it is wanted."""
        places = slice(first - self._first, first - self._first + len(logprobs))
        self._logprobs[places] = logprobs
        self._ranks[places] = ranks
        self._is_found[places] = True
        if top is not None:
            num_top = self._top.token_ids.shape[1]
            self._top.token_ids[places] = top.token_ids[:, :num_top]
            self._top.logprobs[places] = top.logprobs[:, :num_top]

    def scores(self) -> PromptScores:
        """All scores up to the first that is not found."""
        count = self._num_found
        top = TopLogprobs(self._top.token_ids[:count], self._top.logprobs[:count]) if self.wants_top else None
        logprobs, ranks = self._logprobs[:count].copy(), self._ranks[:count].copy()
        return PromptScores(self._first, logprobs, ranks, top, self._weight_version)

    def change_weights(self, weight_version: str) -> None:
        """Discard the scores on a change of weights, unless all are found."""
        if not self.is_complete:
            self._is_found[:] = False
            self._weight_version = weight_version

    @property
    def _num_found(self) -> int:
        return len(self._is_found) if self.is_complete else int(np.argmin(self._is_found))


class ChunkDemand(NamedTuple):
    """Extra work of the chunk that begins at position `start`.

    `targets` are scored after positions `scored_from ...`; `forced_rows` apply from position `forced_from` on.
    """

    start: int
    scored_from: int = 0
    targets: np.ndarray = NO_TARGETS
    forced_from: int = 0
    forced_rows: np.ndarray | None = None


def demand_of(
    start: int, stop: int, *, scoring: PromptScoring | None, forced: RoutedExperts | None
) -> ChunkDemand | None:
    """The extra work of a chunk over positions `[start, stop)`; None where there is none."""
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


def block_work_of(demands: list[tuple[ChunkDemand | None, np.ndarray, np.ndarray]]) -> BlockWork:
    """Join the extra work of a plan's chunks; each entry also has the rows of the chunks it stands for, and their
    tokens."""
    chunks, score_tokens, targets = [], [np.zeros(0, np.intp)], [NO_TARGETS]
    forced_tokens, forced_rows = [np.zeros(0, np.intp)], []
    first_chunk = first_token = 0
    for demand, rows_of_chunks, token_ids in demands:
        if demand is not None:
            chunks.append(first_chunk)
            score_tokens.append(first_token + demand.scored_from - demand.start + np.arange(len(demand.targets)))
            targets.append(demand.targets)
        if demand is not None and demand.forced_rows is not None:
            rows = demand.forced_rows
            forced_tokens.append(first_token + demand.forced_from - demand.start + np.arange(len(rows)))
            forced_rows.append(rows)
        first_chunk, first_token = first_chunk + len(rows_of_chunks), first_token + len(token_ids)
    return BlockWork(
        np.asarray(chunks, np.intp),
        np.concatenate(score_tokens),
        np.concatenate(targets),
        np.concatenate(forced_tokens),
        forced_rows=np.concatenate(forced_rows) if forced_rows else None,
    )
