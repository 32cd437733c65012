"""What counts as the same curve after kills: each step once, with its rewards, tokens and version."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.kill_training import different_steps, drift, rows_of, wait_for_steps, wait_until_over

ROWS = [
    {"step": step, "reward": step / 8, "tokens": 9, "version": f"v{step}", "dead": 0.5, "held_out": 0.5}
    for step in range(5)
]


def test_equal_curves_do_not_differ_and_seconds_are_not_compared():
    assert different_steps(ROWS, [{**row, "seconds": 1, "restarts": 2} for row in ROWS]) == 0


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        pytest.param(ROWS[:-1], 1, id="one step less"),
        pytest.param(ROWS[:3] + ROWS[2:], 3, id="a step twice"),
        pytest.param([*ROWS[:-1], {**ROWS[-1], "reward": 0.5 + 2**-53}], 1, id="one bit"),
        pytest.param([*ROWS[:-1], {**ROWS[-1], "version": "v3"}], 1, id="an update less"),
    ],
)
def test_what_differs_is_counted(rows, number):
    assert different_steps(ROWS, rows) == number


def test_the_drift_is_that_of_the_worst_step():
    assert drift(ROWS, ROWS) == 0
    assert drift(ROWS, [*ROWS[:2], {**ROWS[2], "held_out": 0.25}, *ROWS[3:]]) == 0.25


def test_rows_that_are_being_written_are_read_later(tmp_path):
    assert rows_of(tmp_path) == []
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS)[:-9], encoding="utf-8")
    assert rows_of(tmp_path) == []


def test_a_run_that_fails_or_is_over_too_soon_is_an_error(tmp_path):
    (tmp_path / "output").write_text("no server", encoding="utf-8")
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="no server"):
        wait_until_over(failed, tmp_path)
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    with pytest.raises(RuntimeError, match="over before step 4"):
        wait_for_steps(over, tmp_path, 4)
