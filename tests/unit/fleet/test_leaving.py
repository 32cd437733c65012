"""A replica that Serve stops hands over early where others run, and in any case before it is killed."""

from __future__ import annotations

import pytest

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.fleet.member import BEFORE_END_S, Leaving

STOPPING, RUNNING, STARTING = "STOPPING", "RUNNING", "STARTING"


@pytest.mark.parametrize(
    ("others", "hand_over_after_s", "at_s"),
    [
        ([], 10.0, 120.0 - BEFORE_END_S),
        ([STARTING, STOPPING], 10.0, 120.0 - BEFORE_END_S),
        ([RUNNING], 10.0, 10.0),
        ([RUNNING], 0.0, 0.0),
        ([RUNNING], 300.0, 120.0 - BEFORE_END_S),
    ],
)
def test_requests_are_handed_over_at_their_time_and_again_later(others, hand_over_after_s, at_s):
    now, handed_over = [1000.0], []
    server = ServerSettings(drain_timeout_s=120.0, hand_over_after_s=hand_over_after_s)
    leaving = Leaving("mine", lambda: len(handed_over.append(now[0]) or []), server, lambda: now[0])
    rest = {f"other {number}": state for number, state in enumerate(others)}
    leaving.look({"mine": RUNNING, **rest})
    now[0] = 2000.0
    for second in range(121):
        now[0] = 2000.0 + second
        leaving.look({"mine": STOPPING, **rest})
    assert handed_over == [2000.0 + second for second in range(int(at_s), 121)]


def test_a_time_to_drain_that_is_short_leaves_none_to_wait():
    handed_over = []
    leaving = Leaving("mine", lambda: len(handed_over.append(0) or []), ServerSettings(drain_timeout_s=1.0))
    leaving.look({"mine": STOPPING})
    assert handed_over
