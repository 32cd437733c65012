"""A chart holds every figure of its result, says where the machine was busy, and is drawn from what is committed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.chart import MOST_LINES, Chart, Series
from benchmarks.charts import charts
from benchmarks.engine_runs import CLOCK
from benchmarks.figures import BUSY_LOAD, Spread
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
DRAWN = ROOT / "docs" / "figures"
RUN = {"seconds": 2.0, "tokens_sampled": 100.0, **dict.fromkeys(CLOCK, 0.1), "steps": 10}
PARTS = {part: {"median": 2.0, "min": 1.0, "max": 3.0} for part in ("schedule", "pack", "commit", "host")}
W1 = {"workload": asdict(WORKLOADS["W1"]), "runs": {"ours": [{"seconds": 2.0}]}}
RANKS = {"balanced": {"1.0": [{"imbalance": 1.25, "kept_share": 0.75}]}}
FLEET_ROWS = [
    {"num_replicas": n, "rate": r, "policy": p, "requests_s": r, "goodput_s": r / 2, "ttft_p99_s": 1.0, "hits": 0.5}
    for n, r in ((4, 2.0), (4, 1.0), (1, 2.0))
    for p in ("round robin", "prefix")
]
SMALLEST = {
    "curve": {"curve": {"1": [RUN, RUN], "16": [RUN, {**RUN, "seconds": 1.0}]}},
    "scheduler": {"host_us": {"1": PARTS, "16": PARTS}},
    "peers": {"peers": {"facts": {}, "limits": {"1": 9.0, "16": 90.0}, "workloads": {"W1": W1}}},
    "selection": {"balanced_selection": {"drawn_skew": "zipf 1", "balance": {"zipf 1": RANKS}}},
    "simulation": {"fleet_simulation": {"replica": "any", "asked": "chat", "rows": FLEET_ROWS}},
    "other": {"workloads": {}},
}
"""The smallest result of each kind."""


def series_of(*values: float, name: str = "a") -> Series:
    return Series(name, [(2.0**i, Spread(value, 0.9 * value, 1.2 * value)) for i, value in enumerate(values)])


def test_each_kind_of_result_has_its_charts_and_others_none():
    drawn = {name: set(charts(result)) for name, result in SMALLEST.items()}
    assert drawn == {
        "curve": {"tokens", "steps", "host"},
        "scheduler": {"host"},
        "peers": {"streams"},
        "selection": {"imbalance", "kept"},
        "simulation": {"goodput", "ttft", "hits"},
        "other": set(),
    }


def test_points_are_the_figures_of_the_result():
    (tokens,) = charts(SMALLEST["curve"])["tokens"].series
    assert tokens.points == [(1.0, Spread(50.0, 50.0, 50.0)), (16.0, Spread(75.0, 50.0, 100.0))]
    (together, *parts) = charts(SMALLEST["scheduler"])["host"].series
    assert together.points == [(1.0, Spread(2.0, 1.0, 3.0)), (16.0, Spread(2.0, 1.0, 3.0))]
    assert [part.name for part in parts] == ["schedule", "pack", "commit"]
    goodput = charts(SMALLEST["simulation"])["goodput"].series[1]
    assert goodput.points == [(1.0, Spread(0.5, 0.5, 0.5)), (2.0, Spread(1.0, 1.0, 1.0))]
    assert charts(SMALLEST["selection"])["kept"].series[0].points == [(1.0, Spread(0.75, 0.75, 0.75))]


@pytest.mark.parametrize("name", ["curve", "scheduler", "peers", "selection"])
def test_a_chart_says_so_where_its_machine_was_busy(name):
    for load, note in ((BUSY_LOAD, ""), (1.8, "busy machine: load average 1.8 before the start")):
        found = charts({**SMALLEST[name], "machine": {"load_before": load}})
        assert {chart.note for chart in found.values()} == {note}


def test_a_chart_of_nothing_or_of_too_much_is_refused():
    for series in ([], [Series("a", [])], [series_of(1.0)] * (MOST_LINES + 1)):
        with pytest.raises(ValueError, match="1 to 5 lines"):
            Chart("title", "x", "y", series)


def test_the_fingerprint_changes_with_anything_that_is_drawn():
    base = Chart("title", "x", "y", [series_of(1.0, 2.0)])
    others = [
        Chart("title", "x", "y", [series_of(1.0, 2.5)]),
        Chart("title", "x", "y", [series_of(1.0, 2.0, name="b")]),
        Chart("title", "x", "y", [series_of(1.0, 2.0)], note="busy machine"),
        Chart("title", "x", "z", [series_of(1.0, 2.0)]),
    ]
    assert len({chart.fingerprint for chart in [base, *others]}) == 5
    assert base.fingerprint == Chart("title", "x", "y", [series_of(1.0, 2.0)]).fingerprint


def test_committed_charts_are_those_of_the_committed_results():
    """`python -m benchmarks.plots` draws them anew."""
    stated = {
        f"{file.stem}-{suffix}.svg": chart.fingerprint
        for file in RESULTS.glob("*.json")
        for suffix, chart in charts(json.loads(file.read_text(encoding="utf-8"))).items()
    }
    drawn = {
        file.name: file.read_text(encoding="utf-8") for file in DRAWN.glob("*.svg") if file.stem != "replay_effect"
    }
    assert set(drawn) == set(stated)
    assert [name for name, fingerprint in stated.items() if fingerprint not in drawn[name]] == []


def test_what_is_drawn_is_the_same_each_time_and_carries_its_words(tmp_path):
    plots = pytest.importorskip("benchmarks.plots", reason="needs matplotlib: pip install -e '.[bench]'")
    chart = Chart("Speed <of it>", "streams", "tokens/s", [series_of(1.0, 2.0), series_of(3.0, name="b")], log_x=True)
    for name in ("a.svg", "b.svg"):
        plots.draw(chart, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    words = "".join(ElementTree.fromstring(text).itertext())
    assert all(word in words for word in ("Speed <of it>", "streams", "tokens/s", "b", chart.fingerprint))
