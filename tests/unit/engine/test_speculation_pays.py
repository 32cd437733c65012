"""Under a clock that knows what steps cost, drafts bring most of what they can, and cost next to nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest

from rayserve_moe.engine import cycle as step_cycle
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import Proposer
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from tests.support.devices.simulated_device import ModelDrafts, SimulatedDevice
from tests.support.engine.schedulers import one, scheduler, some_reach
from tests.unit.engine.test_speculation import FIRST, by_position

NUM_NEW, MOST = 400, 7
NOT_OVERLAPPED = 0.04
"""Of the least step: what a step takes longer that is committed before the next is planned."""
LEAST_OF_PLAIN, LEAST_OF_BEST, LEAST_OF_WORSE = 0.97, 0.9, 0.75
Curve = Callable[[int], float]


class Timed:
    """An executor with a clock that every step sets forward by what it costs, more or less."""

    not_overlapped = NOT_OVERLAPPED

    def __init__(self, seconds_of: Curve) -> None:
        self._device = SimulatedDevice(by_position)
        self.now, self._seconds_of, self._generator = 0.0, seconds_of, np.random.default_rng(3)

    def execute(self, plan: StepPlan) -> StepResult | None:
        took = self._seconds_of(plan.num_tokens) if plan.num_chunks else self.not_overlapped * self._seconds_of(1)
        self.now += took * (1 + 0.03 * self._generator.random())
        return self._device.execute(plan)


class OftenRight:
    """Drafts what comes next, each token with a probability."""

    name = "often right"

    def __init__(self, share: float) -> None:
        self._share, self._generator = share, np.random.default_rng(5)

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        follows = FIRST + sequence.num_tokens + np.arange(count, dtype=np.int32)
        return follows + (self._generator.random(count) >= self._share).astype(np.int32)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class EarlyAlone(OftenRight):
    """Has drafts for prompts of one token alone."""

    name = "early alone"

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        return super().propose(sequence, count if sequence.num_prompt_tokens == 1 else 0)


class SmallModel(Timed):
    """The host takes half as long for a step as its devices."""

    not_overlapped = 0.5


class HeldUp(Timed):
    """Now and then a step takes much longer, drafts or not."""

    often, long_s = 0.04, 12.0

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.now += self.long_s * (self._generator.random() < self.often) * bool(plan.num_chunks)
        return super().execute(plan)


def seconds(seconds_of: Curve, *, num_streams: int, share: float | None, clock: type[Timed] = Timed) -> float:
    """What it takes to run so many sequences, without drafts or with some."""
    limits = {"max_tokens": NUM_NEW + 8, "num_pages": 40 * num_streams, "page_size": 16}
    target = scheduler(num_rows=num_streams, verify_rows=(1 + MOST) * num_streams, **limits)
    speculation = None
    if share is not None:
        speculation = Speculation(target.table, OftenRight(share), max_drafts=MOST, reach=some_reach())
    timed = clock(seconds_of)
    cycle = cycle_with(target, timed, speculation=speculation)
    for i in range(num_streams):
        cycle.scheduler.add([one(f"r{i}", [0], num_new=NUM_NEW)])
    with patch.object(step_cycle.time, "perf_counter", lambda: timed.now):
        while cycle.has_work:
            cycle.run()
    return timed.now


def seconds_of_short(
    num_requests: int, *, proposer: Proposer | None, timed: SmallModel | TimedHead | None = None
) -> float:
    """Return the seconds for many short answers, 16 at a time; each step after the first has prompts."""
    target = scheduler(num_rows=16, verify_rows=16 * (1 + MOST), max_tokens=256, num_pages=64, page_size=16)
    speculation = None
    if proposer is not None:
        speculation = Speculation(target.table, proposer, max_drafts=MOST, reach=some_reach())
    timed = timed or SmallModel(CURVES["not at all"])
    cycle = cycle_with(target, timed, speculation=speculation)
    for i in range(num_requests):
        is_early = i < 16
        cycle.scheduler.add([one(f"r{i}", [0] if is_early else [0, 1, 2], num_new=10 if is_early else 2 + i % 3)])
    with patch.object(step_cycle.time, "perf_counter", lambda: timed.now):
        while cycle.has_work:
            cycle.run()
    return timed.now


class TimedHead:
    """The same of devices with a draft model, whose drafts take time after each step that wants them."""

    draft_s = 0.5

    def __init__(self, seconds_of: Curve, *, share: float) -> None:
        self._device = SimulatedDevice(by_position, drafts=ModelDrafts(MOST, share))
        self.now, self._seconds_of = 0.0, seconds_of

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.now += self._seconds_of(plan.num_tokens) if plan.num_chunks else 0.0
        self.now += self.draft_s * plan.wants_drafts
        return self._device.execute(plan)


def seconds_with_head(seconds_of: Curve, *, num_new: int, share: float | None) -> float:
    """What it takes to run four sequences, without drafts or with those of a draft model."""
    target = scheduler(num_rows=4, verify_rows=32, max_tokens=num_new + 8, num_pages=num_new, page_size=16)
    device = TimedHead(seconds_of, share=share or 0.0)
    speculation = None
    if share is not None:
        speculation = Speculation(target.table, ModelProposer("head"), max_drafts=MOST, reach=some_reach())
    cycle = cycle_with(target, device, speculation=speculation)
    for i in range(4):
        target.add([one(f"r{i}", [0], num_new=num_new)])
        target.waiting[-1].rules.stop_token_ids = frozenset()
    with patch.object(step_cycle.time, "perf_counter", lambda: device.now):
        while cycle.has_work:
            cycle.run()
    return device.now


def test_a_head_that_is_never_right_is_asked_less_and_less():
    cost = CURVES["a quarter for each row"]
    plain, own = (seconds_with_head(cost, num_new=1500, share=share) for share in (None, 0.0))
    assert plain / own >= LEAST_OF_PLAIN


def test_short_answers_whose_prompts_fill_most_steps_end_a_trial_as_well():
    plain = seconds_of_short(600, proposer=None)
    assert plain / seconds_of_short(600, proposer=EarlyAlone(share=0.9)) >= LEAST_OF_PLAIN


def test_a_head_is_not_asked_again_while_every_step_has_prompts():
    cost = CURVES["not at all"]
    plain, own = (
        seconds_of_short(600, proposer=proposer, timed=TimedHead(cost, share=0.0))
        for proposer in (None, ModelProposer("head"))
    )
    assert plain / own >= LEAST_OF_PLAIN


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_head_that_is_right_is_used(share: float):
    cost = CURVES["not at all"]
    plain, own = (seconds_with_head(cost, num_new=800, share=each) for each in (None, share))
    best = max(
        (1 + sum(share**i for i in range(1, most + 1))) * cost(4) / (cost(4 * (1 + most)) + TimedHead.draft_s)
        for most in (1, 3, 5, MOST)
    )
    assert plain / own >= LEAST_OF_BEST * best


CURVES: dict[str, Curve] = {
    "a half for each row": lambda n: 1 + 0.48 * (n - 1),
    "a quarter for each row": lambda n: 1 + 0.25 * (n - 1),
    "by distinct experts": lambda n: 0.3 + 0.7 * 8 * (1 - 0.875**n) + 0.02 * n,
    "almost by rows": lambda n: n**0.95,
    "not at all": lambda n: 1 + 0.01 * n,
    "once for the first": lambda n: 1.0 if n in (1, 4) else 1.8 + 0.6 * n / (8 if n <= 8 else 32),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("num_streams", [1, 4, 16])
@pytest.mark.parametrize("curve", list(CURVES))
def test_drafts_cost_little_and_bring_most_of_what_they_can(curve: str, num_streams: int, share: float):
    cost = CURVES[curve]
    plain = seconds(cost, num_streams=num_streams, share=None)
    own = seconds(cost, num_streams=num_streams, share=share)
    assert plain / own >= LEAST_OF_PLAIN
    host = NOT_OVERLAPPED * cost(1)
    best = max(
        (1 - share ** (most + 1)) / (1 - share) * cost(num_streams) / (cost(num_streams * (1 + most)) + host)
        for most in (1, 3, 5, MOST)
    )
    assert plain / own >= LEAST_OF_BEST * best


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_what_holds_up_a_step_is_no_loss_of_drafts(num_streams: int, share: float):
    cost, held_up = CURVES["not at all"], HeldUp.often * HeldUp.long_s
    plain, own = (seconds(cost, num_streams=num_streams, share=each, clock=HeldUp) for each in (None, share))
    taken = (1 - share ** (MOST + 1)) / (1 - share)
    best = taken * (cost(num_streams) + held_up) / (cost(num_streams * (1 + MOST)) + NOT_OVERLAPPED + held_up)
    assert plain / own >= LEAST_OF_WORSE * best
