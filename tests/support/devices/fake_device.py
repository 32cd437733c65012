"""What the devices make of plans, in numpy: tokens that depend on all keys a token sees, and drafts that stay there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, LAST_SAMPLED, StepPlan, StepResult

NUM_WORDS = 50


@dataclass
class _Row:
    """What is remembered of a row: its pages, the token sampled last, where the one before that stands, and drafts."""

    pages: dict[int, int] = field(default_factory=dict)
    last: int = 0
    at: int = -1
    drafts: list[int] = field(default_factory=list)


class FakeDevice:
    """An executor whose sample at a token is a function of all tokens that stand in the row's pages up to its place, so
    that a token at a wrong place, or a page of another row, shows in what comes out.

    After steps that want them there are `num_drafts` drafts of each row, each right with `share`. `steps` are the
    positions and ids of all tokens by step, as they were computed; `num_awaited` chunks were awaited. Every
    `lost_every`th call fails, and all that is there is lost.
    """

    lost_every = 0

    def __init__(self, *, num_rows: int, page_size: int, num_drafts: int, share: float, seed: int = 0) -> None:
        self.num_awaited = self.num_calls = 0
        self.steps: dict[int, list[tuple[int, int, int]]] = {}
        self._rows = [_Row() for _ in range(num_rows)]
        self._page_size, self._num_drafts, self._share = page_size, num_drafts, share
        self._keys: dict[tuple[int, int], int] = {}
        self._generator = np.random.default_rng(seed)
        self._result: StepResult | None = None

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run a step, and return the result of the one before."""
        self.num_calls += 1
        if self.lost_every and self.num_calls % self.lost_every == 0:
            self._rows, self._keys, self._result = [_Row() for _ in self._rows], {}, None
            raise ExecutorFailure("lost")
        before, self._result = self._result, self._run(plan) if plan.num_chunks else None
        return before

    def _run(self, plan: StepPlan) -> StepResult:
        for row, index, page in zip(plan.pages.rows, plan.pages.indices, plan.pages.page_ids, strict=True):
            self._rows[row].pages[int(index)] = int(page)
        places, sampled = self._places(plan), []
        self.steps[plan.step_id] = places
        for row, position, token in places:
            self._keys[self._slot(row, position)] = token
        ends, samples = np.cumsum(plan.chunks.lengths), plan.chunks.samples
        of_rows: dict[int, list[tuple[int, int, int]]] = {}
        for chunk in np.flatnonzero(samples).tolist():
            source, position, token = places[ends[chunk] - 1]
            sampled.append(self._sample(source, position))
            of_rows.setdefault(int(plan.chunks.rows[chunk]), []).append((position, token, sampled[-1]))
        for chunk in np.flatnonzero(plan.chunks.lengths == 0).tolist():
            self._fork(int(plan.chunks.rows[chunk]), places[ends[chunk] - 1][0], int(plan.chunks.starts[chunk]))
        for row, found in of_rows.items():
            self._note(self._rows[row], found)
        drafts = None
        if plan.wants_drafts and of_rows:
            drafts = np.array([self._draft(row) for row in of_rows], np.int32)
        ids, ones = np.array(sampled, np.int32), np.ones(len(sampled), np.int32)
        return StepResult(plan.step_id, ids, -ids.astype(np.float32), ones, drafts=drafts)

    def _places(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Row, position and id of each token of a plan."""
        places, token = [], 0
        for row, start, length in zip(plan.chunks.rows, plan.chunks.starts, plan.chunks.lengths, strict=True):
            state, first = self._rows[row], int(start)
            if first <= AWAITED:
                self.num_awaited += 1
                first = state.at + 1 + AWAITED - first
            for position in range(first, first + int(length)):
                found = int(plan.chunks.token_ids[token])
                if found == LAST_SAMPLED:
                    found = state.last
                elif found == DRAFTED:
                    found = state.drafts[position - state.at - 2]
                places.append((int(row), position, found))
                token += 1
        return places

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._page_size)
        return self._rows[row].pages[index], offset

    def _sample(self, row: int, position: int, more: tuple[int, ...] = ()) -> int:
        keys = [self._keys.get(self._slot(row, place), 0) for place in range(position + 1)]
        mixed = 17
        for key in (*keys, *more):
            mixed = (mixed * 31 + key + 1) % 1_000_003
        return mixed % NUM_WORDS

    def _note(self, row: _Row, found: list[tuple[int, int, int]]) -> None:
        """Of the samples of a row only those count that follow right drafts."""
        row.at, _, row.last = found[0]
        for position, token, sampled in found[1:]:
            if token != row.last:
                return
            row.at, row.last = position, sampled

    def _draft(self, row: int) -> list[int]:
        state, follows = self._rows[row], ()
        for _ in range(self._num_drafts):
            follows = (*follows, self._sample(row, state.at, (state.last, *follows)))
        wrong = self._generator.random(self._num_drafts) >= self._share
        state.drafts = [token + bool(is_wrong) for token, is_wrong in zip(follows, wrong, strict=True)]
        return state.drafts

    def _fork(self, row: int, source: int, position: int) -> None:
        """Copy the page in which a prompt ends to that of a row that forks off it."""
        for offset in range(position % self._page_size):
            place = position - position % self._page_size + offset
            self._keys[self._slot(row, place)] = self._keys[self._slot(source, place)]
