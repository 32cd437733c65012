"""Figures follow from runs by definition, and tables hold what the result file holds."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.figures import OUTSIDE, PARTS, rate, speed_ratio, spread, step_parts
from benchmarks.run import check_complete
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, prompts_of


def run_of(seconds: float, steps: int = 10) -> dict[str, float]:
    """A run half of whose time is on the device, a quarter in the other parts, a quarter outside."""
    shares = dict.fromkeys(PARTS, 1 / 16) | {"device": 1 / 2}
    return {"seconds": seconds, "steps": steps, **{f"{part}_s": share * seconds for part, share in shares.items()}}


def result_of(theirs: list[dict[str, float]]) -> dict:
    measured = {"workload": asdict(WORKLOADS["W4"]), "ours": [run_of(1.0), run_of(2.0)], "theirs": theirs}
    versions = {"jax": "1", "transformers": "2", "torch": "3"}
    machine = {"cpu": "Some CPU", "cores": 2, "device": "cpu", "load_before": 0.1, "versions": versions}
    return {
        "size": "tiny",
        "repeats": 2,
        "num_parameters": 2_000_000,
        "machine": machine,
        "ours": {"dtype": "float32", "devices": 2},
        "theirs": {"dtype": "bfloat16", "experts": "grouped_mm", "threads": 2} if theirs else None,
        "workloads": {"W4": measured},
    }


def test_a_spread_does_not_depend_on_order():
    assert spread([3.0, 1.0, 2.0]) == spread([1.0, 2.0, 3.0])
    assert str(spread([3.0, 1.0, 2.0])) == "2.00 (1.00-3.00)"


def test_a_rate_is_work_over_time():
    assert str(rate(100, [run_of(1.0), run_of(2.0), run_of(4.0)])) == "50.0 (25.0-100.0)"


def test_ratios_pair_neighbours_so_that_a_drift_of_the_machine_cancels():
    ours = [run_of(1.0), run_of(3.0), run_of(10.0)]
    ratio = speed_ratio(ours, [run_of(2 * run["seconds"]) for run in ours])
    assert (ratio.median, ratio.least, ratio.greatest) == (2.0, 2.0, 2.0)


def test_runs_without_a_neighbour_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        speed_ratio([run_of(1.0), run_of(1.0)], [run_of(1.0)])


def test_the_parts_of_a_step_are_the_whole_run():
    parts = step_parts([run_of(2.0, steps=4)])
    assert sum(share for _, share in parts.values()) == pytest.approx(1)
    assert sum(milliseconds for milliseconds, _ in parts.values()) == pytest.approx(500)
    assert parts["device"] == pytest.approx((250, 0.5))
    assert parts[OUTSIDE] == pytest.approx((125, 0.25))


def test_prompts_repeat_by_name_and_number_only():
    first = prompts_of("W3", 0, vocab_size=512)
    assert first == prompts_of("W3", 0, vocab_size=512) != prompts_of("W3", 1, vocab_size=512)
    assert [len(prompt) for prompt in first] == [512] * 16
    assert all(3 <= token < 512 for prompt in first for token in prompt)


def test_a_run_that_stopped_early_does_not_count():
    check_complete(16 * 64, WORKLOADS["W4"])
    with pytest.raises(RuntimeError, match="1023 tokens"):
        check_complete(16 * 64 - 1, WORKLOADS["W4"])


def test_every_row_of_a_table_is_as_wide_as_its_heading():
    for result in (result_of([run_of(2.0), run_of(4.0)]), result_of([])):
        for block in tables(result).split("\n\n")[1:]:
            assert len({(line.count("|"), len(line)) for line in block.splitlines()}) == 1


def test_the_table_names_the_peer_only_where_it_ran():
    compared, alone = tables(result_of([run_of(2.0), run_of(4.0)])), tables(result_of([]))
    assert "2.00 (2.00-2.00)" in compared
    assert "ours / theirs" in compared
    assert "ours / theirs" not in alone
    assert "not run" in alone
