"""When sequences are given drafts, how many, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayserve_moe.engine.draft_choice import Acceptance, StepTimes, choose_drafts, seconds_of
from rayserve_moe.engine.proposers import Proposer
from rayserve_moe.requests import DraftCounts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.verify_rows import follows

FIRST_REST, LONGEST_REST = 8, 512
"""Steps without drafts, overlapped, before drafts are tried: at the start, and most after they did not pay."""
FRUITLESS_STEPS = 4
"""Steps in a row without drafts that end trying."""
ACCOUNT_STEPS = 32
"""Steps after which the seconds that drafts took and saved are balanced."""
NO_DRAFTS: dict[int, np.ndarray] = {}


@dataclass
class DraftTotals:
    """What became of drafts so far: verified chains, their drafts and the right ones among them, and the seconds that
    proposing took."""

    chains: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0


class Speculation:
    """Decides before every step whether it has drafts. Those of one step follow on tokens that are on the host, so
    steps do not overlap while it `is_on`.

    It is off to begin with, and after drafts did not pay: where no step of several had any that were worth their rows
    by `choose_drafts`, or where the steps since the last account took longer than plain ones would have taken for the
    same tokens. Then it stays off, twice as long each time. Where it `is_fixed` it decides nothing: all steps have all
    drafts.
    """

    def __init__(self, table: RowTable, proposer: Proposer, *, most_drafts: int, is_fixed: bool = False) -> None:
        self.proposer = proposer
        self.totals = DraftTotals()
        self._table, self._most, self._fixed = table, most_drafts, is_fixed
        self._acceptance = Acceptance(len(table.sequences))
        self._plain, self._verifying = StepTimes(), StepTimes()
        self._rest, self._next_rest = FIRST_REST, FIRST_REST
        self._num_fruitless = self._num_accounted = 0
        self._saved_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the next step is planned with `draft`."""
        return self._fixed or self._rest <= 0

    def draft(self, rows: np.ndarray) -> Mapping[int, np.ndarray]:
        """The drafts of decoding rows whose requests allow it and that no guide limits; none where they are not worth
        it."""
        begun = time.perf_counter()
        found = {}
        for row in rows.tolist():
            sequence = self._table.sequences[row]
            if sequence is not None and sequence.request.speculative and sequence.guide is None:
                drafts = self.proposer.propose(sequence, self._most)
                if len(drafts):
                    found[row] = drafts[: self._most]
        most = self._most if self._fixed else self._chosen(len(rows), found)
        self.totals.draft_s += time.perf_counter() - begun
        self._num_fruitless = 0 if most else self._num_fruitless + 1
        return {row: drafts[:most] for row, drafts in found.items()} if most else NO_DRAFTS

    def note_drafts(self, schedule: Schedule, counts: np.ndarray) -> None:
        """Note which samples of a step count (`samples_that_count`), before they are committed."""
        rows, is_draft = schedule.sampling_rows, follows(schedule.sampling_rows)
        verified, drafted = np.unique(rows[is_draft], return_counts=True)
        right = np.bincount(rows[counts & is_draft], minlength=len(self._table.sequences))[verified]
        self._acceptance.note(verified, drafted, right=right)
        self.totals.chains += len(verified)
        self.totals.drafted += int(drafted.sum())
        self.totals.accepted += int(right.sum())
        for row, num_drafted, num_right in zip(verified.tolist(), drafted.tolist(), right.tolist(), strict=True):
            if (sequence := self._table.sequences[row]) is not None:
                before = sequence.drafts
                sequence.drafts = DraftCounts(
                    before.chains + 1, before.drafted + num_drafted, before.accepted + num_right
                )

    def note_time(self, schedule: Schedule, num_tokens: int, *, seconds: float) -> None:
        """Note how long a step took that gave `num_tokens` tokens; those with prompts are left out."""
        if schedule.plan.has_blocks or not num_tokens:
            return
        if not self.is_on:
            self._plain.add(schedule.plan.num_tokens, seconds)
            self._rest -= 1
            if self._rest == 0:
                self._begin()
            return
        self._verifying.add(schedule.plan.num_tokens, seconds)
        if not self._fixed:
            num_rows = len(np.unique(schedule.sampling_rows))
            self._balance(num_tokens / num_rows * seconds_of(num_rows, self._plain.known()) - seconds)

    def end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        self.proposer.end(sequence)

    def _chosen(self, num_rows: int, found: Mapping[int, np.ndarray]) -> int:
        if not found:
            return 0
        rows = np.fromiter(found, np.intp, len(found))
        available = np.array([len(drafts) for drafts in found.values()])
        acceptance = self._acceptance.of(rows, self._table.generations[rows])
        times = {"plain": self._plain.known(), "verifying": self._verifying.known()}
        return min(self._most, choose_drafts(num_rows, available, acceptance=acceptance, **times))

    def _begin(self) -> None:
        """Try drafts from the next step on."""
        self._acceptance.doubt()
        self._num_fruitless = self._num_accounted = 0
        self._saved_s = 0.0

    def _balance(self, saved_s: float) -> None:
        self._saved_s += saved_s
        self._num_accounted += 1
        lost = False
        if self._num_accounted == ACCOUNT_STEPS:
            lost = self._saved_s < 0
            self._next_rest = self._next_rest if lost else FIRST_REST
            self._num_accounted, self._saved_s = 0, 0.0
        if lost or self._num_fruitless >= FRUITLESS_STEPS:
            self._rest = self._next_rest = min(2 * self._next_rest, LONGEST_REST)
