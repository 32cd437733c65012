"""What the application asks of Ray Serve."""

from __future__ import annotations

import json

import pytest

from rayserve_moe.balancing.planning import planning_config
from rayserve_moe.cluster.eplb_planner import EplbPlanner
from rayserve_moe.config.derive import max_live_requests, max_open_requests
from rayserve_moe.config.load import settings_from
from rayserve_moe.serving.app import build


@pytest.mark.parametrize("ranks", [1, 2, 32])
@pytest.mark.parametrize("waiting", [0, 1024])
def test_serve_lets_through_more_than_all_data_ranks_take(ranks: int, waiting: int) -> None:
    """So that what is too much is refused by the engine, with 429, and never held by Serve."""
    args = {
        "model_path": "x",
        "max_running_requests": 64,
        "max_waiting_requests": waiting,
        "num_hosts": ranks,
        "data_parallel_size": ranks,
    }
    settings = settings_from(args)
    taken = max_live_requests(settings.scheduler, num_data_ranks=ranks)
    assert taken == 64 * ranks + waiting
    let_through = build(args)._bound_deployment.max_ongoing_requests
    assert let_through == max_open_requests(settings.scheduler, num_data_ranks=ranks) > taken


def test_serve_starts_the_balancer_with_what_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file configures it: then what it keeps of the arguments are plain values."""
    monkeypatch.setattr("os.nice", lambda _: 0)
    args = {"model_path": "x", "enable_eplb": True, "eplb_interval": 32, "eplb_window": 64}
    settings = settings_from(args)
    _, balancer = build(args)._bound_deployment._deployment_config.deployment_actors
    for kept in (
        balancer.init_kwargs,
        balancer.model_dump()["init_kwargs"],
        json.loads(balancer.model_dump_json())["init_kwargs"],
    ):
        assert EplbPlanner(**kept)._config == planning_config(settings.balancing, settings.experts)
