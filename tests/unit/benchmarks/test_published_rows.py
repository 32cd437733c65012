"""Requests at once on the computed clock."""

from __future__ import annotations

import pytest

from benchmarks.published_rows import ROWS, Row, closed_loop, figures_of
from benchmarks.simulation.replica import SimulatedReplica
from rayserve_moe.scheduling.scheduler import StepLimits

STEP_S = 0.001
LIMITS = StepLimits(num_rows=4, step_tokens=64, chunk_tokens=64, page_size=16, num_pages=33, max_tokens=65)
ROW = Row("m", "t", requests=4, tokens_per_s=1.0, token_ms=1.0, source="", prompt=16, output=32)


class EvenSteps:
    """Every step takes a millisecond."""

    request_s = 0.0

    def seconds(self, load: object) -> float:
        return STEP_S


def test_a_token_takes_a_step_and_all_requests_share_it():
    ended = closed_loop(SimulatedReplica(LIMITS, EvenSteps()), ROW)
    found = figures_of(ended, num_requests=ROW.requests)
    assert all(one.num_tokens == ROW.output for one in ended) and len(ended) >= 3 * ROW.requests
    assert found["token_s"] == pytest.approx(STEP_S)
    assert found["tokens_per_s"] == pytest.approx(ROW.requests / STEP_S, rel=0.1)
    assert found["first_token_s"] >= STEP_S


def test_steps_twice_as_long_give_half_the_rate(monkeypatch):
    once = figures_of(closed_loop(SimulatedReplica(LIMITS, EvenSteps()), ROW), num_requests=ROW.requests)
    monkeypatch.setattr(EvenSteps, "seconds", lambda *_: 2 * STEP_S)
    twice = figures_of(closed_loop(SimulatedReplica(LIMITS, EvenSteps()), ROW), num_requests=ROW.requests)
    assert twice["tokens_per_s"] == pytest.approx(once["tokens_per_s"] / 2)


def test_published_times_and_rates_of_a_row_agree():
    """Requests at once over the time between tokens is the rate, but for the time of first tokens."""
    for name, row in ROWS.items():
        assert 0.8 < row.tokens_per_s * row.token_ms / 1e3 / row.requests <= 1.02, name
