"""Steps that follow on drafts of which nothing has come back: they change nothing, and turn out as the devices ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rayserve_moe.engine import cycle as step_cycle
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.steps import needs_host_tokens
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.recovery import give_up_step
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, StepPlan, StepResult
from rayserve_moe.scheduling.verify_rows import resolve_awaited
from tests.support.devices.simulated_device import ModelDrafts, SimulatedDevice, of_all_keys
from tests.support.engine.schedulers import all_pages_are_free, choices, limits_of, scheduler, some_reach

DRAFTS, ROWS, PAGE_SIZE = 3, 4, 4
Tokens = dict[tuple[str, int], list[int]]


@dataclass
class Settings:
    """How a run goes."""

    num_drafts: int = DRAFTS
    share: float | None = 0.7
    num_pages: int = 64
    chunk_tokens: int = 64
    preempts_every: int = 0
    aborts_every: int = 0
    rests: float = 0.0
    lost_every: int = 0
    draining: frozenset[int] = field(default_factory=frozenset)


def requests_of(seed: int) -> list[list[Sequence]]:
    """Requests that share prompts, of one choice or several; some tokens end them."""
    generator, found = np.random.default_rng(seed), []
    for number in range(14):
        prompt = [*range(10, 10 + int(generator.integers(9))), *generator.integers(0, 50, generator.integers(1, 9))]
        how = {"num_new": int(generator.integers(1, 40)), "n": int(generator.choice([1, 1, 3]))}
        found.append(choices(str(number), prompt, **how))
    return found


@dataclass
class Run:
    """Tokens of all choices that have ended by themselves, those that were aborted, and what they ran on."""

    cycle: StepCycle
    device: SimulatedDevice
    speculation: Speculation | None = None
    tokens: Tokens = field(default_factory=dict)
    aborted: set[tuple[str, int]] = field(default_factory=set)


class Unreliable:
    """An executor of which every `lost_every`th call fails, and all that is there is lost."""

    def __init__(self, device: SimulatedDevice, *, lost_every: int) -> None:
        self._device, self._lost_every, self._num_calls = device, lost_every, 0

    def execute(self, plan: StepPlan) -> StepResult | None:
        self._num_calls += 1
        if self._lost_every and self._num_calls % self._lost_every == 0:
            self._device.reset()
            raise ExecutorFailure("lost")
        return self._device.execute(plan)


def run(seed: int, settings: Settings, *, check: Callable[[Run], None] | None = None) -> Run:
    """Run requests to their ends; pages and rows add up after every step, and all are free in the end."""
    pages = {"num_pages": settings.num_pages, "page_size": PAGE_SIZE}
    limits = limits_of(num_rows=ROWS, chunk_tokens=settings.chunk_tokens, verify_rows=4 * ROWS, **pages)
    target = Scheduler(limits)
    drafts = ModelDrafts(DRAFTS, settings.share or 0.0, np.random.default_rng(seed))
    device = SimulatedDevice(of_all_keys, limits=limits, drafts=drafts)
    executor = Unreliable(device, lost_every=settings.lost_every)
    speculation = None
    if settings.share is not None:
        how = {"max_drafts": settings.num_drafts, "reach": some_reach(), "is_fixed": True}
        speculation = OnAndOff(target.table, ModelProposer("fake"), **how)
    cycle = cycle_with(target, executor, speculation=speculation)
    found = Run(cycle, device, speculation)
    cycle.losses = Losses(target)
    for group in requests_of(seed):
        target.add(group)
    step, generator = 0, np.random.default_rng(seed + 1)
    while found.cycle.has_work:
        step += 1
        assert step < 3000, "the requests do not come to an end"
        if speculation is not None and generator.random() < settings.rests:
            speculation.wants_drafts = not speculation.wants_drafts
        ended = found.cycle.drain()[1] if step in settings.draining else found.cycle.run()[1]
        target.check_integrity()
        for sequence in ended:
            first, last = sequence.num_prompt_tokens, sequence.num_tokens
            found.tokens[key_of(sequence)] = tokens = sequence.token_ids[first:last].tolist()
            assert sequence.state.logprobs[first:last].tolist() == [-token for token in tokens]
        if check is not None:
            check(found)
        if target.running and settings.preempts_every and step % settings.preempts_every == 0:
            target.preempt(target.running[int(generator.integers(len(target.running)))])
        if target.running and settings.aborts_every and step % settings.aborts_every == 0:
            victim = target.running[int(generator.integers(len(target.running)))]
            found.aborted.add(key_of(found.cycle.end(victim, FinishReason("abort"))))
        target.check_integrity()
    target.flush()
    assert all_pages_are_free(target)
    return found


class Losses:
    """Has all that was submitted taken back, and goes on."""

    trial_is_over = False

    def __init__(self, target: Scheduler) -> None:
        self._target = target

    def recover(self, failure: Exception, lost: list[StepPlan], *, retract: Callable[[], object], **_: Any) -> Any:
        for plan in lost:
            give_up_step(self._target, plan)
        assert (self._target.table.num_computed >= 0).all()
        retract()
        self._target.flush()
        return ()


class OnAndOff(Speculation):
    """Drafts while it is told to."""

    wants_drafts = True

    @property
    def is_on(self) -> bool:
        return self.wants_drafts


def key_of(sequence: Sequence) -> tuple[str, int]:
    return sequence.request.request_id, sequence.choice_index


PLAIN = Settings(share=None)
WAYS = {
    "as it is": {},
    "never right": {"share": 0.0},
    "always right": {"share": 1.0},
    "one draft": {"num_drafts": 1},
    "few pages": {"num_pages": 26},
    "preempting": {"preempts_every": 3},
    "short chunks": {"chunk_tokens": 5, "preempts_every": 7},
    "aborting": {"aborts_every": 9},
    "draining": {"draining": frozenset(range(5, 200, 7))},
    "losing hosts": {"lost_every": 9},
    "on and off": {"rests": 0.2},
    "on and off, with few pages": {"rests": 0.4, "num_pages": 26, "preempts_every": 11},
}


def settles_as_run(found: Run) -> None:
    """The step in flight stands as the devices have computed it, of sequences that are in their rows."""
    if (schedule := found.cycle._in_flight) is None:
        return
    plan, table = schedule.plan, found.cycle.scheduler.table
    ran, firsts = found.device.steps[plan.step_id], np.cumsum(plan.chunks.lengths) - plan.chunks.lengths
    generations = dict(zip(schedule.sampling_rows.tolist(), schedule.sampling_generations.tolist(), strict=True))
    for chunk in np.flatnonzero((plan.chunks.lengths == 1) & plan.chunks.samples).tolist():
        row, position, token, _ = ran[firsts[chunk]]
        if table.generations[row] == generations[row]:
            assert plan.chunks.starts[chunk] == position < table.num_computed[row]
            assert plan.chunks.token_ids[firsts[chunk]] in (LAST_SAMPLED, token)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", list(WAYS))
def test_steps_that_follow_on_unknown_drafts_change_nothing(way: str, seed: int):
    settings = replace(Settings(), **WAYS[way])
    plain, found = run(seed, PLAIN).tokens, run(seed, settings, check=settles_as_run)
    assert found.tokens == {key: tokens for key, tokens in plain.items() if key not in found.aborted}
    assert bool(found.aborted) == bool(settings.aborts_every)
    assert found.device.num_awaited > 20 and found.speculation is not None
    totals = found.speculation.totals
    assert totals.drafted > 0 and (totals.accepted > 0) == (settings.share != 0.0)


def test_a_stream_takes_one_step_for_four_tokens_of_right_drafts():
    """All steps but the first follow on what is not known here."""
    limits = limits_of(num_rows=1, verify_rows=4)
    target = Scheduler(limits)
    device = SimulatedDevice(of_all_keys, limits=limits, drafts=ModelDrafts(DRAFTS, share=1.0))
    how = {"max_drafts": DRAFTS, "reach": some_reach(), "is_fixed": True}
    speculation = Speculation(target.table, ModelProposer("fake"), **how)
    cycle = cycle_with(target, device, speculation=speculation)
    (sequence,) = choices("a", [1, 2, 3], num_new=41)
    sequence.rules.stop_token_ids = frozenset()
    target.add([sequence])
    while cycle.has_work:
        cycle.run()
    assert sequence.num_outputs == 41
    assert cycle.statistics()["steps"] == 1 + 40 // 4
    assert device.num_awaited == 9 * 4 + 4


def one_too_near(table: Any, schedule: Any, **given: Any) -> Any:
    """Takes each row to have one token less."""
    before = table.num_tokens.copy()
    table.num_tokens[:] = before - 1
    try:
        return resolve_awaited(table, schedule, **given)
    finally:
        table.num_tokens[:] = before


def one_too_far(table: Any, schedule: Any, **given: Any) -> Any:
    found = resolve_awaited(table, schedule, **given)
    return replace(
        found, plan=replace(found.plan, chunks=replace(found.plan.chunks, starts=found.plan.chunks.starts + 1))
    )


def drafts_of_another_row(table: Any, schedule: Any, *, before: Any, result: Any) -> Any:
    rolled = result if result.drafts is None else replace(result, drafts=np.roll(result.drafts, 1, axis=0))
    return resolve_awaited(table, schedule, before=before, result=rolled)


@pytest.mark.parametrize("fault", [one_too_near, one_too_far, drafts_of_another_row])
def test_steps_that_turn_out_otherwise_would_be_seen(fault: Callable[..., Any]):
    plain = run(0, PLAIN).tokens
    with patch.object(step_cycle, "resolve_awaited", fault), pytest.raises(AssertionError):
        assert run(0, Settings(), check=settles_as_run).tokens == plain


def test_stale_accepted_counts_would_be_seen():
    """Devices that add the accepted drafts of the step before the last."""
    plain, accept = run(0, PLAIN).tokens, SimulatedDevice.accept

    def stale(device: SimulatedDevice, row: int, found: list[tuple[int, int]]) -> None:
        was = device.rows[row].at if row in device.rows else -1
        accept(device, row, found)
        if device.rows[row].at - was > 1 and len(found) > 1:
            device.rows[row].at -= 1

    with patch.object(SimulatedDevice, "accept", stale), pytest.raises(AssertionError):
        assert run(0, Settings()).tokens == plain


def test_what_needs_each_token_on_the_host_is_found_before_it_runs():
    target = scheduler(num_rows=2)
    for number in range(30):
        target.add(choices(str(number), 3))
    assert not needs_host_tokens(target)
    last = target.waiting[-1]
    last.rules.requested = np.zeros(1, np.int32)
    assert needs_host_tokens(target)
    last.rules.requested = None
    assert not needs_host_tokens(target)
    target.waiting[0].rules.requested = np.zeros(1, np.int32)
    target.schedule()
    assert target.table.wants.num_held == 1 and needs_host_tokens(target)
