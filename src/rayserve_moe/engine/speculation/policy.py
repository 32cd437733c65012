"""Decides when sequences get drafts and how many, by expected gain and measured step times; counts acceptance."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.engine.speculation.model_drafts import ModelProposer, with_drafting
from rayserve_moe.engine.speculation.proposers import Proposer
from rayserve_moe.engine.speculation.step_times import ExpertReach, StepTimes, rounded, seconds_of
from rayserve_moe.requests.results import DraftCounts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import DRAFTED, StepResult
from rayserve_moe.scheduling.verify_rows import follows, is_awaited

REST = 4
"""Steps without drafts, overlapped, before and between looks at whether drafts would pay."""
LOOKS_BEFORE_BACKOFF, MOST_DOUBLINGS = 4, 3
"""Looks in a row that find that those of a draft model would not pay; each one after them doubles the rest."""
FRUITLESS_STEPS = 2
"""Steps in a row without drafts that end trying."""
FIRST_CREDIT, MOST_CREDIT, TRYING_CREDIT = 3.0, 8.0, 1.0
"""What trying drafts may lose, in plain steps: at the start, at most after gains, and what it takes to begin again."""
CREDIT_OF_STEP = 0.01
"""What every step adds to that."""
FORGETTING_STEPS = 256
"""Plain steps in a row after which times of steps with drafts are measured anew."""
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
    steps do not overlap while it `is_on`, unless a draft model leaves chains on the devices (`overlaps`).

    It is off to begin with, and where drafts do not pay. What trying them loses is kept within a credit of a few plain
    steps, that every step adds a hundredth to. While it is off, drafts are still proposed now and then, and compared
    with what follows: it goes on where they promise more tokens per second by `choose_drafts`. Where it `is_fixed` it
    decides nothing.
    """

    def __init__(
        self,
        table: RowTable,
        proposer: Proposer,
        *,
        max_drafts: int,
        reach: ExpertReach,
        is_fixed: bool = False,
    ) -> None:
        self.proposer = proposer
        self.totals = DraftTotals()
        self._table = table
        self._most = max_drafts
        """Maximum number of drafts of a sequence and step."""
        self._fixed = is_fixed
        """Whether all steps have all drafts."""
        self._reach, self._plain, self._verifying = reach, StepTimes(), StepTimes()
        """Seconds of steps without and with drafts, and the cost of more rows than were measured."""
        self._acceptance = Acceptance(len(table.sequences))
        self._trial = Trial()
        """Whether the next step has drafts."""
        self._on_devices = np.full(max_drafts, DRAFTED, np.int32)
        """Stands for drafts whose ids are on the devices only."""
        self._newest: tuple[Schedule, StepResult] | None = None
        """The step that is committed next, or was last."""
        self._watched: list[WatchedDrafts] = []

    @property
    def is_on(self) -> bool:
        """Whether the next step is planned with `draft`."""
        return self._fixed or self._trial.rest <= 0

    @property
    def overlaps(self) -> bool:
        """Whether drafts are on the devices as well, so that a step may follow before they are known here."""
        return isinstance(self.proposer, ModelProposer)

    def draft(self, rows: np.ndarray) -> Mapping[int, np.ndarray]:
        """The drafts of decoding rows whose requests allow it and that no guide limits; none where they are not worth
        it."""
        begun = time.perf_counter()
        found = self._proposed(rows, is_awaited(self._table, rows) if self.overlaps else None)
        most = self._most if self._fixed else self._chosen(len(rows), found)
        self.totals.draft_s += time.perf_counter() - begun
        self._trial.num_fruitless = 0 if most else self._trial.num_fruitless + 1
        return {row: drafts[:most] for row, drafts in found.items()} if most else NO_DRAFTS

    def asking(self, schedule: Schedule, in_flight: Schedule | None) -> Schedule:
        """The next step, as a draft model needs it: drafts are there too when they are looked at."""
        if not isinstance(self.proposer, ModelProposer):
            return schedule
        is_looked_at = self._trial.rest == (1 if in_flight is None else 2)
        return with_drafting(schedule, self._table, wants_drafts=self.is_on or is_looked_at)

    def absorb(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Note what came of a step, before it is committed; `counts`: which samples do, where it has drafts."""
        self._newest = schedule, result
        self.totals.draft_s += result.draft_s
        if result.routing is not None and not schedule.plan.has_blocks:
            self._reach.note(result.routing)
        if counts is not None and schedule.plan.chunks.max_drafts:
            self.record_drafts(schedule, counts)

    def record_drafts(self, schedule: Schedule, counts: np.ndarray) -> None:
        """Note which samples of a step count (`samples_that_count`), before they are committed."""
        rows = schedule.sampling_rows
        is_draft = follows(rows) & (self._table.generations[rows] == schedule.sampling_generations)
        verified, drafted = np.unique(rows[is_draft], return_counts=True)
        right = np.bincount(rows[counts & is_draft], minlength=len(self._table.sequences))[verified]
        self._acceptance.note(verified, drafted, right=right)
        self.totals.chains += len(verified)
        self.totals.drafted += int(drafted.sum())
        self.totals.accepted += int(right.sum())
        for row, num_drafted, num_right in zip(verified.tolist(), drafted.tolist(), right.tolist(), strict=True):
            if (sequence := self._table.sequences[row]) is not None:
                before = sequence.evidence.drafts
                sequence.evidence.drafts = DraftCounts(
                    before.chains + 1, before.drafted + num_drafted, before.accepted + num_right
                )

    def record_time(self, schedule: Schedule, num_tokens: int, *, seconds: float) -> None:
        """Note how long a step took that gave `num_tokens` tokens; those with prompts are left out.

        The step is committed: what a draft model said after it is kept.
        """
        if isinstance(self.proposer, ModelProposer) and self._newest is not None:
            self.proposer.keep(*self._newest, table=self._table)
        began_before_rest = schedule.plan.chunks.max_drafts > 0 and not self.is_on
        if schedule.plan.has_blocks or not num_tokens or began_before_rest:
            return
        trial = self._trial
        trial.credit = min(trial.credit + CREDIT_OF_STEP, MOST_CREDIT)
        if not self.is_on:
            self._plain.add(schedule.plan.num_tokens, seconds)
            trial.rest -= 1
            trial.num_plain += 1
            if trial.rest == 0:
                self._consider(schedule.sampling_rows)
            return
        trial.num_plain = 0
        if self._fixed:
            return
        num_rows = len(np.unique(schedule.sampling_rows))
        alone = seconds_of(num_rows, self._plain.known(), reach=self._reach)
        seconds = self._verifying.add(schedule.plan.num_tokens, seconds, known={num_rows: alone})
        trial.gain(num_tokens / num_rows - seconds / alone)

    def end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        self.proposer.end(sequence)

    def _proposed(self, rows: np.ndarray, are_awaited: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """What is drafted for rows, by row; of awaited ones that is on the devices."""
        found = {}
        awaited = [False] * len(rows) if are_awaited is None else are_awaited.tolist()
        for row, is_there in zip(rows.tolist(), awaited, strict=True):
            sequence = self._table.sequences[row]
            if sequence is not None and sequence.takes_drafts:
                drafts = self._on_devices if is_there else self.proposer.propose(sequence, self._most)
                if len(drafts):
                    found[row] = drafts[: self._most]
        return found

    def _chosen(self, num_rows: int, found: Mapping[int, np.ndarray]) -> int:
        if not found:
            return 0
        rows = np.fromiter(found, np.intp, len(found))
        available = np.array([len(drafts) for drafts in found.values()])
        acceptance = self._acceptance.of(rows, self._table.generations[rows])
        chosen = choose_drafts(
            num_rows,
            available,
            acceptance=acceptance,
            plain=self._plain.known(),
            verifying=self._verifying.known(),
            reach=self._reach,
        )
        return min(self._most, chosen)

    def _consider(self, rows: np.ndarray) -> None:
        """Go on if drafts promise to pay for the rows that decode, else look again soon."""
        begun = time.perf_counter()
        self._compare()
        if self._trial.num_plain >= FORGETTING_STEPS:
            self._trial.num_plain, self._verifying = 0, StepTimes()
        found, backs_off = self._proposed(rows), isinstance(self.proposer, ModelProposer)
        if not self._trial.starts(pays=self._chosen(len(rows), found) > 0, backs_off=backs_off):
            generations, starts = self._table.generations, self._table.num_tokens
            self._watched = [WatchedDrafts(row, int(generations[row]), int(starts[row]), found[row]) for row in found]
        self.totals.draft_s += time.perf_counter() - begun

    def _compare(self) -> None:
        """Note what the drafts that were only watched would have come to."""
        outcomes = []
        for row, generation, start, drafts in self._watched:
            sequence = self._table.sequences[row]
            if sequence is not None and self._table.generations[row] == generation:
                followed = sequence.token_ids[start : sequence.num_tokens][: len(drafts)]
                is_right = np.logical_and.accumulate(drafts[: len(followed)] == followed)
                outcomes.append((row, len(followed), int(is_right.sum())))
        if outcomes:
            rows, drafted, right = np.array(outcomes).T
            self._acceptance.note(rows, drafted, right=right)
        self._watched = []


class WatchedDrafts(NamedTuple):
    """Drafts of a row that no step verifies: they are compared with the tokens that follow."""

    row: int
    generation: int
    """Generation of the row, which tells whether its sequence is still the same."""
    start: int
    """Tokens of the sequence before the drafts."""
    drafts: np.ndarray


@dataclass
class Trial:
    """When drafts are tried, so that trying them loses a few plain steps at most."""

    rest: int = REST
    """Steps without drafts until the next look; at 0 or below steps have drafts."""
    credit: float = FIRST_CREDIT
    """What trying drafts may lose, in plain steps."""
    num_fruitless: int = 0
    """Steps in a row that could have had drafts and had none."""
    num_plain: int = 0
    """Steps in a row without drafts."""
    num_declined: int = 0
    """Looks in a row that found that drafts would not pay."""

    def gain(self, num_steps: float) -> None:
        """Add what a step with drafts gained, in plain steps, and rest if the credit is used up or drafts are rare."""
        self.credit += num_steps
        if self.credit < 0:
            self.rest = int((TRYING_CREDIT - self.credit) / CREDIT_OF_STEP)
        elif self.num_fruitless >= FRUITLESS_STEPS:
            self.rest = REST

    def starts(self, *, pays: bool, backs_off: bool) -> bool:
        """Return True if drafts begin because a look found that they would pay; otherwise rest.

        Rests grow with the number of such looks in a row if the proposer `backs_off`.
        """
        self.num_fruitless = 0
        self.num_declined = 0 if pays else self.num_declined + 1
        if not pays:
            doublings = min(max(self.num_declined - LOOKS_BEFORE_BACKOFF, 0), MOST_DOUBLINGS)
            self.rest = REST << doublings if backs_off else REST
        return pays


LADDER = (1, 3, 5, 7)
"""Numbers of drafts per sequence that steps are planned with, besides 0."""
FORGETTING = 0.9
"""Weight of older outcomes after each verification of a row."""
PRIOR_TRIALS = 2.0
MARGIN = 1.02
"""Minimum tokens per second with drafts, relative to steps without drafts."""


class Acceptance:
    """Share of right drafts of each row, among drafts with right predecessors; a new row has the mean of all rows."""

    def __init__(self, num_rows: int) -> None:
        self._right, self._tried = np.zeros(num_rows), np.zeros(num_rows)
        self._owners = np.full(num_rows, -1, np.int64)
        self._right_of_all, self._tried_of_all = 0.5 * PRIOR_TRIALS, PRIOR_TRIALS

    def of(self, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Return the share of each row, float [N]. A changed generation makes a row new."""
        is_new = self._owners[rows] != generations
        self._right[rows[is_new]] = self._tried[rows[is_new]] = 0.0
        self._owners[rows] = generations
        mean = self._right_of_all / self._tried_of_all
        return (self._right[rows] + PRIOR_TRIALS * mean) / (self._tried[rows] + PRIOR_TRIALS)

    def note(self, rows: np.ndarray, drafted: np.ndarray, *, right: np.ndarray) -> None:
        """Record the drafts and right drafts of each row; drafts after the first wrong one do not count."""
        tried = right + (right < drafted)
        self._right[rows] = FORGETTING * self._right[rows] + right
        self._tried[rows] = FORGETTING * self._tried[rows] + tried
        self._right_of_all = FORGETTING * self._right_of_all + right.sum()
        self._tried_of_all = FORGETTING * self._tried_of_all + tried.sum()


def choose_drafts(
    num_rows: int,
    available: np.ndarray,
    *,
    acceptance: np.ndarray,
    plain: Mapping[int, float],
    verifying: Mapping[int, float],
    reach: ExpertReach,
) -> int:
    """Return the number of drafts per sequence with the most tokens per second, from LADDER or 0.

    `num_rows` sequences decode. N of them have drafts: `available` int [N], each right with probability `acceptance`
    float [N]. `plain` and `verifying` are the known seconds of steps without and with drafts by number of rows; `plain`
    is not empty.

    Only the first number of drafts that exceeds the largest verified step is considered, so unmeasured sizes are tried
    in small increments. Such a step is expected to take as long as the size before it until two sizes are measured,
    because part of the cost is common to all of them.
    """
    alone, largest, at = seconds_of(num_rows, plain, reach=reach), max(verifying, default=0), rounded(num_rows)
    known = {size: seconds for size, seconds in sorted({**plain, **verifying}.items()) if size > at}
    first, with_alone = min(known, default=at), {at: alone} | known
    counts = np.minimum(available, np.array(LADDER)[:, None])
    gained = acceptance * (1 - acceptance**counts) / np.maximum(1 - acceptance, 1e-9)
    sizes, tokens = num_rows + counts.sum(axis=1), num_rows + gained.sum(axis=1)
    best, best_rate = 0, MARGIN * num_rows / alone
    for num_drafts, size, expected in zip(LADDER, sizes.tolist(), tokens.tolist(), strict=True):
        rate = expected / seconds_of(size, known if size > first and known else with_alone, reach=reach)
        if rate > best_rate:
            best, best_rate = num_drafts, rate
        if rounded(size) > largest:
            break
    return best
