"""Speculation policy: decides when sequences get drafts and how many, by expected gain and measured step times."""

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
"""Overlapped steps without drafts before and between estimates of whether drafts would pay."""
LOOKS_BEFORE_BACKOFF, MAX_DOUBLINGS = 3, 5
"""Unfavourable estimates in a row after which the rest doubles with each further estimate.

The rest doubles at most MAX_DOUBLINGS times, and only until estimates take LOOK_SHARE of the time.
"""
LOOK_SHARE, MODEL_LOOK_STEPS = 0.01, 1.0
"""Share of the time that estimates may take; plain steps that an estimate takes on the devices of a draft model."""
FRUITLESS_STEPS = 2
"""Consecutive steps without drafts that end a trial."""
FIRST_CREDIT, MAX_CREDIT, TRYING_CREDIT = 3.0, 8.0, 1.0
"""Credit in plain steps that trying drafts may lose: initial, maximum, and required to begin again."""
CREDIT_OF_STEP = 0.01
"""Credit added by every step."""
FORGETTING_STEPS = 256
"""Consecutive plain steps after which the times of steps with drafts are measured anew."""
NO_DRAFTS: dict[int, np.ndarray] = {}


@dataclass
class DraftTotals:
    """Totals of drafts since the start."""

    chains: int = 0
    """Verified chains of drafts."""
    drafted: int = 0
    """Drafts in them."""
    accepted: int = 0
    """Accepted drafts."""
    draft_s: float = 0.0
    """Seconds of proposing drafts."""


class Speculation:
    """Decision before every step whether it has drafts.

    Drafts follow tokens that are on the host, so steps do not overlap while it `is_on`, unless a draft model keeps its
    drafts on the devices (`overlaps`). Speculation begins switched off, and switches off if drafts do not pay: losses
    are limited by a credit of a few plain steps, to which every step adds a hundredth. While it is off, drafts are
    still proposed now and then and compared with the tokens that follow. It switches on if `choose_drafts` expects more
    tokens per second. `is_fixed` disables these decisions.
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
        self._max_drafts = max_drafts
        """Maximum number of drafts of a sequence and step."""
        self._fixed = is_fixed
        """True if all steps have the maximum number of drafts."""
        self._reach = reach
        """Estimates the cost of numbers of rows that were not measured."""
        self._plain, self._verifying = StepTimes(), StepTimes()
        """Seconds of steps without and with drafts."""
        self._acceptance = Acceptance(len(table.sequences))
        self._trial = Trial()
        """Decides whether the next step has drafts."""
        self._on_devices = np.full(max_drafts, DRAFTED, np.int32)
        """Placeholder for drafts whose ids are only on the devices."""
        self._newest: tuple[Schedule, StepResult] | None = None
        """The step that is committed next, or was committed last."""
        self._watched: list[WatchedDrafts] = []
        """Drafts that are compared with the tokens that follow, without a step that verifies them."""

    @property
    def is_on(self) -> bool:
        """Return True if the next step is planned with `draft`."""
        return self._fixed or self._trial.rest <= 0

    @property
    def overlaps(self) -> bool:
        """Return True if drafts stay on the devices, so that a step may follow before they reach the host."""
        return isinstance(self.proposer, ModelProposer)

    def draft(self, rows: np.ndarray) -> Mapping[int, np.ndarray]:
        """Return the drafts of decoding rows by row; empty if drafts would not pay.

        Rows with a guide, and rows that disallow drafts, have none.
        """
        begun = time.perf_counter()
        found = self._proposed(rows, is_awaited(self._table, rows) if self.overlaps else None)
        count = self._max_drafts if self._fixed else self._chosen(len(rows), found)
        self.totals.draft_s += time.perf_counter() - begun
        self._trial.num_fruitless = 0 if count else self._trial.num_fruitless + 1
        return {row: drafts[:count] for row, drafts in found.items()} if count else NO_DRAFTS

    def with_drafting(self, schedule: Schedule, in_flight: Schedule | None) -> Schedule:
        """Return the next step with the inputs of a draft model; drafts are also requested before an estimate.

        A step with prompts has none, because no estimate follows it (`record_time`).
        """
        if not isinstance(self.proposer, ModelProposer):
            return schedule
        is_looked_at = self._trial.rest == (1 if in_flight is None else 2) and not schedule.plan.has_blocks
        return with_drafting(schedule, self._table, wants_drafts=self.is_on or is_looked_at)

    def record_result(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Record the result of a step before it is committed; `counts` are its accepted samples, if it has drafts."""
        self._newest = schedule, result
        self.totals.draft_s += result.draft_s
        if result.routing is not None and not schedule.plan.has_blocks:
            self._reach.record(result.routing)
        if counts is not None and schedule.plan.chunks.max_drafts:
            self.record_drafts(schedule, counts)

    def record_drafts(self, schedule: Schedule, counts: np.ndarray) -> None:
        """Record the accepted samples of a step (`samples_that_count`), before they are committed."""
        rows = schedule.sampling_rows
        is_draft = follows(rows) & (self._table.generations[rows] == schedule.sampling_generations)
        verified, drafted = np.unique(rows[is_draft], return_counts=True)
        right = np.bincount(rows[counts & is_draft], minlength=len(self._table.sequences))[verified]
        self._acceptance.record(verified, drafted, right=right)
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
        """Record the seconds of a step with `num_tokens` tokens, unless it has prompts; end a trial without drafts.

        The step is committed; the drafts of a draft model after it are kept.
        """
        if isinstance(self.proposer, ModelProposer) and self._newest is not None:
            self.proposer.keep(*self._newest, table=self._table)
        if self._trial.is_fruitless and not self._fixed:
            self._trial.rest = REST
        began_before_rest = schedule.plan.chunks.max_drafts > 0 and not self.is_on
        if schedule.plan.has_blocks or not num_tokens or began_before_rest:
            return
        trial = self._trial
        trial.credit = min(trial.credit + CREDIT_OF_STEP, MAX_CREDIT)
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
        """Drop the drafts of a sequence that has ended."""
        self.proposer.end(sequence)

    def _proposed(self, rows: np.ndarray, are_awaited: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """Return the drafts of rows, by row; drafts of awaited rows are placeholders."""
        found = {}
        awaited = [False] * len(rows) if are_awaited is None else are_awaited.tolist()
        for row, is_there in zip(rows.tolist(), awaited, strict=True):
            sequence = self._table.sequences[row]
            if sequence is not None and sequence.takes_drafts:
                drafts = self._on_devices if is_there else self.proposer.propose(sequence, self._max_drafts)
                if len(drafts):
                    found[row] = drafts[: self._max_drafts]
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
        return min(self._max_drafts, chosen)

    def _consider(self, rows: np.ndarray) -> None:
        """Switch on if drafts promise to pay for the decoding rows; otherwise schedule the next estimate."""
        begun = time.perf_counter()
        self._compare()
        if self._trial.num_plain >= FORGETTING_STEPS:
            self._trial.num_plain, self._verifying = 0, StepTimes()
        found = self._proposed(rows)
        pays = self._chosen(len(rows), found) > 0
        if not pays:
            generations, starts = self._table.generations, self._table.num_tokens
            self._watched = [WatchedDrafts(row, int(generations[row]), int(starts[row]), found[row]) for row in found]
        took = time.perf_counter() - begun
        step_s = seconds_of(max(1, len(rows)), self._plain.known(), reach=self._reach)
        num_steps = MODEL_LOOK_STEPS if isinstance(self.proposer, ModelProposer) else took / max(step_s, 1e-9)
        self._trial.starts(pays=pays, max_rest=int(num_steps / LOOK_SHARE))
        self.totals.draft_s += took

    def _compare(self) -> None:
        """Record how many of the watched drafts the following tokens have confirmed."""
        outcomes = []
        for row, generation, start, drafts in self._watched:
            sequence = self._table.sequences[row]
            if sequence is not None and self._table.generations[row] == generation:
                followed = sequence.token_ids[start : sequence.num_tokens][: len(drafts)]
                is_right = np.logical_and.accumulate(drafts[: len(followed)] == followed)
                outcomes.append((row, len(followed), int(is_right.sum())))
        if outcomes:
            rows, drafted, right = np.array(outcomes).T
            self._acceptance.record(rows, drafted, right=right)
        self._watched = []


class WatchedDrafts(NamedTuple):
    """Drafts of a row that no step verifies; they are compared with the tokens that follow."""

    row: int
    generation: int
    """Generation of the row, to detect a change of its sequence."""
    start: int
    """Tokens of the sequence before the drafts."""
    drafts: np.ndarray


@dataclass
class Trial:
    """State that decides when drafts are tried, limiting the loss to a few plain steps."""

    rest: int = REST
    """Steps without drafts until the next estimate; at 0 or below steps have drafts."""
    credit: float = FIRST_CREDIT
    """Plain steps that trying drafts may lose."""
    num_fruitless: int = 0
    """Consecutive steps that could have had drafts and had none."""
    num_plain: int = 0
    """Consecutive steps without drafts."""
    num_declined: int = 0
    """Consecutive estimates by which drafts would not pay."""

    @property
    def is_fruitless(self) -> bool:
        """Return True if several steps in a row found no drafts, although they could have had some."""
        return self.rest <= 0 and self.num_fruitless >= FRUITLESS_STEPS

    def gain(self, num_steps: float) -> None:
        """Add the gain of a step with drafts, in plain steps, and rest if the credit is used up."""
        self.credit += num_steps
        if self.credit < 0:
            self.rest = int((TRYING_CREDIT - self.credit) / CREDIT_OF_STEP)

    def starts(self, *, pays: bool, max_rest: int) -> None:
        """Begin steps with drafts if an estimate favours them; otherwise rest.

        Rests grow with the number of unfavourable estimates in a row, up to `max_rest`.
        """
        self.num_fruitless = 0
        self.num_declined = 0 if pays else self.num_declined + 1
        if not pays:
            doublings = min(max(self.num_declined - LOOKS_BEFORE_BACKOFF, 0), MAX_DOUBLINGS)
            self.rest = max(REST, min(REST << doublings, max_rest))


LADDER = (1, 3, 5, 7)
"""Numbers of drafts per sequence that steps are planned with, besides 0."""
FORGETTING = 0.9
"""Weight of older outcomes after each verification of a row."""
PRIOR_TRIALS = 2.0
MARGIN = 1.02
"""Minimum tokens per second with drafts, relative to steps without drafts."""


class Acceptance:
    """Acceptance rate of drafts per row, counting drafts whose predecessors were accepted.

    A new row has the mean rate of all rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._right, self._tried = np.zeros(num_rows), np.zeros(num_rows)
        self._owners = np.full(num_rows, -1, np.int64)
        self._right_of_all, self._tried_of_all = 0.5 * PRIOR_TRIALS, PRIOR_TRIALS

    def of(self, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Return the rate of each row, float [N]. A changed generation makes a row new."""
        is_new = self._owners[rows] != generations
        self._right[rows[is_new]] = self._tried[rows[is_new]] = 0.0
        self._owners[rows] = generations
        mean = self._right_of_all / self._tried_of_all
        return (self._right[rows] + PRIOR_TRIALS * mean) / (self._tried[rows] + PRIOR_TRIALS)

    def record(self, rows: np.ndarray, drafted: np.ndarray, *, right: np.ndarray) -> None:
        """Record the drafts and accepted drafts of each row; drafts after the first rejected draft do not count."""
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
    """Return the number of drafts per sequence, from LADDER or 0, that maximises tokens per second.

    `num_rows` sequences decode. N of them have drafts: `available` int [N], each accepted with probability `acceptance`
    float [N]. `plain` and `verifying` are the known seconds of steps without and with drafts by number of rows; `plain`
    is not empty.

    Only the first number of drafts that exceeds the largest verified step is considered, so unmeasured sizes are tried
    in small increments. Such a step is expected to take as long as the previous size until two sizes are measured,
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
