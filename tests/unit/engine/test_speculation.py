"""Drafts are tried where they may pay, and rest where they lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.engine.speculation.policy import (
    CREDIT_OF_STEP,
    FIRST_CREDIT,
    FRUITLESS_STEPS,
    REST,
    TRYING_CREDIT,
    Speculation,
)
from rayserve_moe.engine.speculation.proposers import NgramProposer, SiblingProposer
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.results import DraftCounts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import NUM_TOKENS, Sequence
from rayserve_moe.scheduling.step_plan import Chunks
from tests.support.devices.simulated_device import SimulatedDevice, Spot
from tests.support.engine.run_requests import speculation_of
from tests.support.engine.schedulers import choices, one, scheduler, some_reach

LENGTH, FIRST = 400, 100
SETTINGS = SpeculationSettings("NGRAM", min_match=1)


def by_position(device: SimulatedDevice, spot: Spot) -> tuple[int, bool]:
    """Sample tokens that count on from position to position."""
    return FIRST + spot.position + 1 + len(spot.drafted), True


@dataclass
class Knowing:
    """Drafts what comes next, or always something else."""

    is_right: bool
    name: str = "knowing"

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        first = FIRST + sequence.num_tokens
        return np.arange(first, first + count, dtype=np.int32) + (0 if self.is_right else 1)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def target_of(num_rows: int = 4) -> Scheduler:
    return scheduler(num_rows=num_rows, max_tokens=2 * LENGTH, num_pages=90, page_size=16, verify_rows=8 * num_rows)


def plain_cycle() -> StepCycle:
    return cycle_with(target_of(), SimulatedDevice(by_position))


def speculating(proposer: object, *, is_fixed: bool = False, num_rows: int = 4) -> StepCycle:
    target = target_of(num_rows)
    speculation = Speculation(target.table, proposer, max_drafts=7, reach=some_reach(), is_fixed=is_fixed)
    return cycle_with(target, SimulatedDevice(by_position), speculation=speculation)


def run_all(cycle: StepCycle, *, num_new: int = LENGTH) -> tuple[Sequence, int]:
    """A sequence, and the turns it took."""
    sequence = one("a", [0], num_new=num_new)
    cycle.scheduler.add([sequence])
    num_turns = 0
    while cycle.has_work:
        cycle.run()
        cycle.scheduler.check_integrity()
        num_turns += 1
    assert sequence.token_ids[: sequence.num_tokens].tolist() == [0, *range(FIRST + 1, FIRST + num_new + 1)]
    return sequence, num_turns


def test_right_drafts_give_eight_tokens_a_step_and_wrong_ones_one():
    sequence, num_turns = run_all(speculating(Knowing(True), is_fixed=True))
    assert num_turns == 1 + -(-(LENGTH - 1) // 8)
    assert sequence.evidence.drafts == DraftCounts(num_turns - 1, LENGTH - 1 - (num_turns - 1), LENGTH - num_turns)
    sequence, num_turns = run_all(speculating(Knowing(False), is_fixed=True))
    drafts = sequence.evidence.drafts
    assert num_turns == LENGTH and drafts.accepted == 0 and drafts.chains == LENGTH - 2


def note_steps(speculation: Speculation, schedule, count: int, *, tokens: int, seconds: float) -> int:
    """Note so many steps that take so long; returns after how many it was not as it was in the beginning."""
    was_on = speculation.is_on
    for i in range(count):
        speculation.record_time(schedule, tokens, seconds=seconds)
        if speculation.is_on != was_on:
            return i + 1
    return 0


def plain_schedule(cycle: StepCycle):
    """A step in which one sequence decodes."""
    cycle.scheduler.add([one("b", [0], num_new=LENGTH)])
    cycle.run()
    return cycle.scheduler.schedule()


def with_draft(schedule: Schedule) -> Schedule:
    """The same step with a draft of its sequence."""
    chunks = schedule.plan.chunks
    parts = (chunks.rows, chunks.starts, chunks.lengths, chunks.token_ids, chunks.samples)
    doubled = Chunks(*(np.repeat(part, 2) for part in parts), max_drafts=1)
    return replace(schedule, plan=replace(schedule.plan, chunks=doubled))


def test_losses_end_trying_until_other_steps_have_paid_for_them():
    cycle = speculating(Knowing(True))
    schedule, speculation = plain_schedule(cycle), speculation_of(cycle)
    assert speculation is not None and not speculation.is_on
    assert note_steps(speculation, schedule, 1000, tokens=1, seconds=1.0) == REST
    speculation.draft(np.array([0]))
    lost = 0.5
    num_steps = note_steps(speculation, with_draft(schedule), 1000, tokens=2, seconds=2.5)
    assert num_steps * (lost - CREDIT_OF_STEP) == pytest.approx(FIRST_CREDIT, abs=lost)
    rest = note_steps(speculation, schedule, 10_000, tokens=1, seconds=1.0)
    assert rest * CREDIT_OF_STEP >= TRYING_CREDIT - CREDIT_OF_STEP


@pytest.mark.parametrize("seconds", [[1.5] * 1000, [1.5, 80.0, *[1.5] * 20, 80.0]], ids=["as ever", "held up at times"])
def test_a_gain_keeps_them_on(seconds: list[float]):
    cycle = speculating(Knowing(True))
    schedule, speculation = plain_schedule(cycle), speculation_of(cycle)
    assert speculation is not None
    note_steps(speculation, schedule, REST, tokens=1, seconds=1.0)
    assert speculation.is_on
    for took in seconds:
        assert note_steps(speculation, with_draft(schedule), 1, tokens=2, seconds=took) == 0


def test_without_drafts_steps_overlap():
    cycle = speculating(NgramProposer(SETTINGS))
    schedule, speculation = plain_schedule(cycle), speculation_of(cycle)
    assert speculation is not None
    assert note_steps(speculation, schedule, 1000, tokens=1, seconds=1.0) == 0 and not speculation.is_on


def test_steps_without_drafts_end_trying():
    cycle = speculating(Knowing(True))
    schedule, speculation = plain_schedule(cycle), speculation_of(cycle)
    assert speculation is not None
    note_steps(speculation, schedule, REST, tokens=1, seconds=1.0)
    speculation.proposer = NgramProposer(SETTINGS)
    for _ in range(FRUITLESS_STEPS):
        assert speculation.is_on and not speculation.draft(np.array([0]))
        speculation.record_time(schedule, 1, seconds=1.0)
    assert not speculation.is_on


def test_wrong_drafts_are_watched_and_not_tried():
    cycle = speculating(Knowing(False))
    _, num_turns = run_all(cycle)
    assert speculation_of(cycle).totals.drafted < LENGTH // 20
    assert num_turns <= 1.05 * LENGTH


def know(sequence: Sequence, token_ids: list[int]) -> None:
    """Have a sequence out of a row know these tokens."""
    sequence.state = sequence.state._replace(token_ids=np.array(token_ids, np.int32))
    sequence.state.counters[NUM_TOKENS] = len(token_ids)


def test_siblings_draft_what_others_have_answered():
    first, second = choices("r", [1, 2, 3], n=2)
    first.group.choices = second.group.choices = [first, second]
    proposer = SiblingProposer(SETTINGS)
    know(first, [1, 2, 3, 7, 8, 9])
    assert proposer.propose(first, 4).tolist() == []
    assert proposer.propose(second, 4).tolist() == [7, 8, 9]
    know(first, [1, 2, 3, 7, 8, 9, 4])
    proposer.propose(first, 4)
    assert proposer.propose(second, 4).tolist() == [7, 8, 9, 4]
    proposer.end(first)
    later = one("later", [1, 2, 3], num_new=5)
    assert proposer.propose(later, 2).tolist() == [7, 8]
    other = one("other", [5, 2, 3], num_new=5)
    assert proposer.propose(other, 2).tolist() == []


def test_an_answer_that_failed_is_no_draft_and_what_has_ended_takes_no_memory():
    proposer, finish = SiblingProposer(SETTINGS), FinishReason("error")
    sequence = one("failed", [1, 2, 3], num_new=5)
    know(sequence, [1, 2, 3, 7, 8])
    proposer.propose(sequence, 4)
    sequence.finish = finish
    proposer.end(sequence)
    assert not proposer._groups and not proposer._finished
    assert proposer.propose(one("later", [1, 2, 3], num_new=5), 4).tolist() == []


def test_drafts_lose_no_cache_hit_and_no_page():
    """Turns of a conversation find as much cached as without drafts, right or wrong, and leave as many pages."""

    def turns(proposer: object | None) -> tuple[list[int], int]:
        cycle = plain_cycle() if proposer is None else speculating(proposer, is_fixed=True)
        known, cached = [0, 1, 2], []
        for turn, num_new in enumerate((29, 30, 31, 64)):
            cycle.scheduler.add([sequence := one(f"turn{turn}", known, num_new=num_new)])
            while cycle.has_work:
                cycle.run()
                cycle.scheduler.check_integrity()
            cached.append(sequence.cache.num_cached)
            known = [*sequence.token_ids[: sequence.num_tokens].tolist(), 5, 6, 7]
        (rank,) = cycle.scheduler.ranks
        return cached, rank.tree.num_cached_pages

    plain = turns(None)
    assert plain[0][0] == 0 and all(plain[0][1:])
    for is_right in (True, False):
        assert turns(Knowing(is_right)) == plain
