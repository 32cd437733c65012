"""What was lost and what differs is counted, and every fault has its line."""

from __future__ import annotations

from benchmarks.kill_nodes import Answer, differing, table_of

EXPECTED: list[Answer | str] = [([1, 2], [-0.1, -0.2], [[0]]), ([3], [-0.3], [[1]]), ([4], [-0.5], [[2]])]


def test_what_differs_is_counted_and_what_is_lost_is_not_compared() -> None:
    assert differing(EXPECTED, EXPECTED) == {"lost": 0, "tokens": 0, "rows": 0, "logprob_gap": 0.0}
    found: list[Answer | str] = [([1, 5], [-0.1, -9.0], [[0]]), "lost", ([4], [-0.25], [[7]])]
    assert differing(found, EXPECTED) == {"lost": 1, "tokens": 1, "rows": 1, "logprob_gap": 0.25}


def test_the_table_has_a_line_per_fault() -> None:
    row = {"repeats": 10, "requests": 320, "lost": 0, "tokens": 0, "rows": 0, "p50_s": 6.04, "worst_s": 7.0}
    said = table_of({"raylet": {**row, "logprob_gap": 0.00002}})
    assert "| raylet | 10 | 320 | 0 | 0 | 0 | 6.0 | 7.0 | 2e-05 |" in " ".join(said.split())
