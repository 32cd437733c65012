"""The laws of replaced hosts notice what they are for: with a fault planted in the code, they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.engine.loop import EngineStoppedError
from rayserve_moe.engine.recovery import hosts as recovery
from rayserve_moe.engine.recovery.hosts import StepLosses
from rayserve_moe.scheduling.scheduler import unfinished
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from tests.support.devices.lost_hosts import LosingExecutor
from tests.support.experts.eplb_proposals import CountedSteps
from tests.support.experts.placements import random_placement
from tests.unit.engine.test_recovery import answers, recovering, said, varied

LOSSES = frozenset([6, 15])
Plant = Callable[[pytest.MonkeyPatch], object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(recovery, "WAITS_S", (0.0, 0.0))
    with caplog.at_level(logging.CRITICAL + 1):
        yield


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    with recovering(LosingExecutor()) as loop:
        return said(answers(loop, varied()))


def at_every_loss(change: Callable[[Sequence], object]) -> Plant:
    """A fault in what is kept of the sequences that a loss meets."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        recover = StepLosses.recover

        def planted(self: StepLosses, *arguments: object, **named: object) -> object:
            for sequence in unfinished(self._scheduler):
                if sequence.num_outputs:
                    change(sequence)
            return recover(self, *arguments, **named)

        monkeypatch.setattr(StepLosses, "recover", planted)

    return plant


def send_rows_again(sequence: Sequence) -> None:
    sequence.published.num_routing_rows = 0


def send_token_again(sequence: Sequence) -> None:
    sequence.published.num_tokens = max(sequence.num_prompt_tokens, sequence.published.num_tokens - 1)


def skip_token(sequence: Sequence) -> None:
    sequence.published.num_tokens = sequence.num_tokens + 1


class LateExecutor(LosingExecutor):
    """After a rebuild, the first result that is waited for is the last one of the hosts before, under its number."""

    late: StepResult | None = None

    def rebuild(self) -> None:
        self.late = self.device.in_flight
        super().rebuild()

    def execute(self, plan: StepPlan) -> StepResult | None:
        result = super().execute(plan)
        if result is None or self.late is None or len(self.late.token_ids) != len(result.token_ids):
            return result
        late, self.late = self.late, None
        return replace(result, token_ids=late.token_ids)


PLANTED: dict[str, Plant] = {
    "a row is committed twice": at_every_loss(send_rows_again),
    "a token is committed twice": at_every_loss(send_token_again),
    "a token is lost between commit and answer": at_every_loss(skip_token),
}


def outcome(executor: LosingExecutor, expected: list[tuple]) -> str:
    """What the law of losses says: empty where it holds."""
    try:
        with recovering(executor, max_step_tokens=32) as loop:
            found = said(answers(loop, varied()))
    except (AssertionError, EngineStoppedError) as error:
        return f"refused: {error}"
    return "" if found == expected else "other answers"


def test_without_a_fault_the_law_holds(expected: list[tuple]) -> None:
    executor = LosingExecutor(LOSSES)
    assert outcome(executor, expected) == ""
    assert executor.num_rebuilds == len(LOSSES)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_noticed(name: str, expected: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    assert outcome(LosingExecutor(LOSSES), expected)


def test_a_result_of_older_hosts_is_noticed_where_it_is_taken(expected: list[tuple]) -> None:
    executor = LateExecutor(LOSSES, loses_late=True)
    assert outcome(executor, expected)


@pytest.mark.parametrize("believes", [False, True])
def test_the_last_plan_believed_after_a_rebuild_is_noticed(believes: bool) -> None:
    """Where slots hold other experts than the engine takes them to hold, the law of `test_eplb_steps` fails."""
    start = identity_placement(3, 12, ep_size=4, num_redundant=4)
    wanted = random_placement(start, seed=1)
    eplb = EplbSteps(Migration(start, hosts=2, slots_per_step=1))
    before = CountedSteps(eplb, np.ones((3, 12)), tokens_per_step=10)
    eplb.set_target(wanted)
    before.run(60)
    before.assert_hold(wanted)
    after = CountedSteps(eplb, np.ones((3, 12)), tokens_per_step=10)
    after.experts, after.shares = start.expert_of_slot.copy(), start.share_of_slot.copy()
    if not believes:
        eplb.restart(GroupLayout(num_expert_ranks=4, num_redundant_experts=4, num_hosts=2))
    after.run(60)
    assert np.array_equal(after.experts, eplb.migration.placement.expert_of_slot) is not believes
    assert eplb.migration.placement is wanted
