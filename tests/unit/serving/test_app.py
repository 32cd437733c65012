"""What the application asks of Ray Serve."""

from __future__ import annotations

import pytest

from rayserve_moe.config.derive import most_live_requests, most_open_requests
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
    taken = most_live_requests(settings.scheduler, num_data_ranks=ranks)
    assert taken == 64 * ranks + waiting
    let_through = build(args)._bound_deployment.max_ongoing_requests
    assert let_through == most_open_requests(settings.scheduler, num_data_ranks=ranks) > taken
