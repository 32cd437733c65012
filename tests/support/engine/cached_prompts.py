"""Law of cached prompts: the second run of a workload finds its prompts cached and has the same outcomes."""

from __future__ import annotations

from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import ModelCard
from tests.support.engine.host_runners import WAY
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import cycle_for, run_on
from tests.support.engine.workload import mixed_workload

MIN_CACHED = 500


def check_cached_prompts(runner: HostRunner, card: ModelCard, alone: Outcomes) -> None:
    """Run the workload twice.

    Raises: AssertionError if an outcome differs or at most MIN_CACHED prompt tokens are cached.
    """
    cycle = cycle_for(runner, card, WAY)
    for _ in range(2):
        found = run_on(cycle, card, mixed_workload())
        assert_identical(found, alone)
    assert sum(outcome.num_cached for outcome in found.values()) > MIN_CACHED
    cycle.scheduler.flush()
