"""Every way in which an answer can differ is counted as that."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kill_repeats import Answer, differing, saved_result, table_of

EXPECTED: list[Answer | str] = [("ab", [-0.1, -0.2], "rows"), ("cd", [-0.3], "more"), ("ef", [], "rest")]


def test_what_differs_is_counted_and_what_is_lost_is_not_compared() -> None:
    assert differing(EXPECTED, EXPECTED) == {"lost": 0, "tokens": 0, "logprobs": 0, "rows": 0, "logprob_gap": 0.0}
    found: list[Answer | str] = [("ax", [-0.1, -0.25], "rows"), "ReadError", ("ef", [], None)]
    counts = {"lost": 1, "tokens": 1, "logprobs": 1, "rows": 1, "logprob_gap": 0.0}
    assert differing(found, EXPECTED) == counts, "log-probs of other tokens are not compared"
    near = [("ab", [-0.1, -0.25], "rows"), *EXPECTED[1:]]
    assert round(differing(near, EXPECTED)["logprob_gap"], 6) == 0.05
    assert differing([("ab", [-0.1], "rows"), *EXPECTED[1:]], EXPECTED)["logprobs"] == 1, "a token too few"


def test_the_table_has_a_line_per_fault() -> None:
    row = {"repeats": 20, "requests": 640, "lost": 0, "tokens": 0, "logprobs": 0, "rows": 0, "p50_s": 4.0, "worst_s": 5}
    assert "| SIGKILL, 1 host | 20 | 640 | 0 | 0 | 0 | 0 | 4.0 | 5 | 0.0e+00 |" in " ".join(
        table_of({"SIGKILL, 1 host": row}).split()
    )


def test_rows_of_other_faults_stay_with_their_loads(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert saved_result(path) == {"rows": {}, "loads": {}}
    path.write_text(json.dumps({"machine": {"load_before": 2.5}, "rows": {"SIGKILL, 1 host": {"lost": 0}}}))
    assert saved_result(path) == {"rows": {"SIGKILL, 1 host": {"lost": 0}}, "loads": {"SIGKILL, 1 host": 2.5}}
    path.write_text(json.dumps({"machine": {"load_before": 9}, "loads": {"a": 1}, "rows": {"a": {}}}))
    assert saved_result(path)["loads"] == {"a": 1}
