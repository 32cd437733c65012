"""What the process that deploys makes of what Serve and its replicas say."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from rayserve_moe.serving.start.deployment import DeploymentFailed, StopSignal, _num_running, has_replica, is_lost

LONG_S = 600.0


def test_the_signal_to_stop_is_not_slept_through() -> None:
    """A server that answers 200 on /health for seconds after the signal keeps getting requests."""
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        started = time.monotonic()
        stop.wait(LONG_S)
        assert stop.is_set and time.monotonic() - started < LONG_S / 10
        stop.wait(LONG_S)
        assert time.monotonic() - started < LONG_S / 10
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("answer", "running"),
    [(0, 0), (7, 7), (None, 0), (ActorDiedError(), 0), (TimeoutError(), 1), (GetTimeoutError(), 1)],
)
def test_a_replica_that_is_too_busy_to_answer_still_runs_something(answer: object, running: int) -> None:
    assert _num_running(answer) == running


@pytest.mark.parametrize(("status", "lost"), [("DEPLOYING", False), ("RUNNING", False), ("UNHEALTHY", True)])
def test_a_replica_that_is_lost_right_after_its_start_is_waited_for(status: str, lost: bool) -> None:
    assert is_lost({"moe": ApplicationStatusOverview(ApplicationStatus(status), "", 0.0, {})}) == lost


def test_an_application_that_cannot_be_started_ends_the_command_with_the_cause() -> None:
    message = "Traceback ...\nrayserve_moe.SettingsError: num_pages 3 hold no sequence"
    found = {"moe": ApplicationStatusOverview(ApplicationStatus.DEPLOY_FAILED, message, 0.0, {})}
    with pytest.raises(DeploymentFailed, match="num_pages 3 hold no sequence"):
        is_lost(found)


@pytest.mark.parametrize(
    ("status", "states", "served"),
    [
        ("RUNNING", {"RUNNING": 1}, True),
        ("DEPLOYING", {"RUNNING": 1, "STARTING": 2}, True),
        ("UNHEALTHY", {"RUNNING": 1, "STARTING": 1}, True),
        ("UNHEALTHY", {"STARTING": 1}, False),
        ("DEPLOYING", {}, False),
    ],
)
def test_a_replica_that_does_not_come_up_does_not_end_those_that_serve(
    status: str, states: dict[str, int], served: bool
) -> None:
    found = {ReplicaState(name): number for name, number in states.items()}
    deployment = DeploymentStatusOverview(
        DeploymentStatus.UPDATING, DeploymentStatusTrigger.CONFIG_UPDATE_STARTED, found, ""
    )
    application = ApplicationStatusOverview(ApplicationStatus(status), "", 0.0, {"moe-server": deployment})
    assert has_replica(application) == served
