"""Figures of an overloaded fleet, and of conversations, count what they say."""

from __future__ import annotations

import pytest

from benchmarks import fleet_conversations, fleet_overload, fleet_table
from benchmarks.fleet_overload import Watched, figures, rate_of
from benchmarks.kill_clients import COMPLETED, HANG, Seen
from benchmarks.simulation.client import EVENT, Answer, _take

MIB = 1 << 20


def test_answers_count_in_the_time_in_which_they_come() -> None:
    seen = [Seen(COMPLETED, 0.0, at) for at in (9.0, 10.0, 14.0, 15.0)] + [Seen("429", 10.0, 10.1, True)]
    assert rate_of(seen, 10.0, 15.0) == 2 / 5


def test_refusals_without_a_time_to_come_back_and_growing_memory_are_named() -> None:
    watched = Watched()
    watched.requests = [
        Seen(COMPLETED, 0.0, fleet_overload.WARM_S - 1),
        Seen(COMPLETED, 0.0, fleet_overload.WARM_S + 20),
        Seen("429", 1.0, 1.1, True),
        Seen("429", 2.0, 2.3),
        Seen(HANG, 0, 99),
    ]
    watched.health = [Seen(COMPLETED, 0.0, 0.004), Seen("503", 0.0, 0.2)]
    watched.late_s = [0.0, 0.001]
    watched.resident = [(60.0 * n, dict.fromkeys(fleet_overload.PARTS, 100 * MIB)) for n in range(4)]
    watched.resident += [(60.0 * n, dict.fromkeys(fleet_overload.PARTS, (100 + n) * MIB)) for n in range(4, 8)]
    found = figures(watched, seconds=60.0, over=60.0, peaks=[0.03, 0.01])
    assert found["answers"] == {COMPLETED: 2, "429": 1, "429 without Retry-After": 1, HANG: 1}
    assert (
        found["goodput_of_peak"] == pytest.approx(1 / (60 - fleet_overload.WARM_S) / 0.02)
        and found["health_failed"] == 1
    )
    assert found["health_worst_ms"] == pytest.approx(200) and found["clients_late_worst_ms"] == pytest.approx(1)
    assert found["resident"]["journal"]["second_half_mib_per_min"] == pytest.approx(1.0)
    asked = {"num_replicas": 2, "factor": 10.0, "seconds": 60.0, "client_cpu_s": 1.0, "wall_s": 70.0}
    assert "| cut off or never answered | 1 |" in " ".join(fleet_table.fleet_overload({**asked, **found}).split())


def test_conversations_are_compared_repeat_by_repeat() -> None:
    one = [{"computed": 100.0, "tokens_s": 10.0, "ttft_p50_s": 0.1, "ttft_p99_s": 0.2}]
    more = [{**one[0], "computed": 104.0}]
    sides = {fleet_conversations.ONE: one, fleet_conversations.PREFIX: more}
    table = fleet_table.fleet_conversations({"size": "tiny", "replicas": 4, "sides": sides})
    assert "1.040 (1.040-1.040)" in table
    first, again = (fleet_conversations.conversations(seed)[0].turns[0].spans for seed in (1, 1))
    assert first == again != fleet_conversations.conversations(2)[0].turns[0].spans


def test_gaps_are_those_between_events_with_tokens() -> None:
    answer = Answer()
    for now, tokens in ((1.0, [5]), (1.5, []), (3.0, [6, 7]), (4.0, [8])):
        _take(answer, EVENT + b'{"choices": [{"token_ids": %s}]}' % str(tokens).encode(), now=now)
    assert answer.gaps == [2.0, 1.0] and (answer.first_at, answer.last_at) == (1.0, 4.0)
