"""What a drain takes a replica's answers for."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from rayserve_moe.serving.start.deployment import _num_running


@pytest.mark.parametrize(
    ("answer", "running"),
    [(0, 0), (7, 7), (None, 0), (ActorDiedError(), 0), (TimeoutError(), 1), (GetTimeoutError(), 1)],
)
def test_a_replica_that_is_too_busy_to_answer_still_runs_something(answer: object, running: int) -> None:
    assert _num_running(answer) == running
