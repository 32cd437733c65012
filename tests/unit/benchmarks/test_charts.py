"""A chart is well-formed SVG that holds every point in its frame, and says in words what it shows."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from benchmarks import plots
from benchmarks.chart import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, Series, line_chart, nice_ticks
from benchmarks.engine_runs import CLOCK
from benchmarks.figures import Spread
from benchmarks.workloads import WORKLOADS

AXES = Axes("Speed <of it>", "running & waiting", "tokens/s")
SVG = "{http://www.w3.org/2000/svg}"


def series_of(*values: float, name: str = "a") -> Series:
    return Series(name, [(2.0**i, Spread(value, 0.9 * value, 1.2 * value)) for i, value in enumerate(values)])


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in lines]


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("values", [(5.0,), (1.0, 2.0, 4.0), (0.0, 1e-4), (123456.0, 3.0)])
def test_every_point_lies_inside_the_frame(values, log_x):
    (points,) = points_of(line_chart([series_of(*values)], Axes("t", "x", "y", log_x)))
    assert len(points) == len(values)
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in points)


def test_a_cost_that_grows_linearly_is_a_straight_line_through_the_origin():
    (points,) = points_of(line_chart([Series("a", [(x, Spread(3 * x, 3 * x, 3 * x)) for x in (1, 2, 8)])], AXES))
    slopes = [(y - (HEIGHT - BOTTOM)) / (x - LEFT) for x, y in points]
    assert slopes == pytest.approx([slopes[0]] * 3, abs=0.01)


def test_doublings_are_equally_far_apart_on_a_logarithmic_axis():
    (points,) = points_of(line_chart([series_of(1.0, 1.0, 1.0, 1.0)], Axes("t", "x", "y", log_x=True)))
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.11)


def test_decades_are_equally_far_apart_on_a_logarithmic_y_axis():
    (points,) = points_of(line_chart([series_of(1e-5, 1e-4, 1e-3, 1e-2)], Axes("t", "x", "y", log_y=True)))
    steps = [b[1] - a[1] for a, b in itertools.pairwise(points)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.11) and steps[0] < 0
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in points)


def test_a_chart_can_be_read_aloud_and_without_colour():
    svg = line_chart([series_of(1.0, 2.0, name=name) for name in ("first", "second & last")], AXES)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == AXES.title
    assert "first, second & last" in root.find(f"{SVG}desc").text
    dashes = [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")]
    assert len(set(dashes)) == 2


def test_a_chart_of_nothing_or_of_too_much_is_refused():
    for series in ([], [Series("a", [])], [series_of(1.0)] * (len(COLOURS) + 1)):
        with pytest.raises(ValueError, match="1 to 5 lines"):
            line_chart(series, AXES)


@pytest.mark.parametrize("greatest", [1e-6, 0.9, 1.0, 6.0, 7.3, 1000.0, 12345.6])
def test_ticks_are_few_even_and_cover_the_values(greatest):
    ticks = nice_ticks(greatest)
    assert ticks[0] == 0
    assert ticks[-1] >= greatest > ticks[-2]
    assert 2 <= len(ticks) <= 8
    assert ticks == pytest.approx([i * ticks[1] for i in range(len(ticks))])


def test_files_with_curves_are_drawn_beside_themselves_and_others_left_alone(tmp_path, monkeypatch, capsys):
    run = {"seconds": 2.0, "tokens_sampled": 100.0, **dict.fromkeys(CLOCK, 0.1), "steps": 10}
    median = {"median": 2.0, "min": 1.0, "max": 3.0}
    parts = dict.fromkeys(("schedule", "pack", "commit", "host"), median)
    w1 = {"workload": asdict(WORKLOADS["W1"]), "runs": {"ours": [{"seconds": 2.0}]}}
    results = {
        "curve": {"curve": {"1": [run, run], "16": [run, run]}},
        "scheduler": {"host_us": {"1": parts, "16": parts}},
        "peers": {"peers": {"facts": {}, "limits": {"1": 9.0, "16": 90.0}, "workloads": {"W1": w1}}},
        "other": {"workloads": {}},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["plots"])
    plots.main()
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    assert drawn == {"curve-tokens.svg", "curve-steps.svg", "curve-host.svg", "scheduler-host.svg", "peers-streams.svg"}
    assert {line.rpartition("/")[2] for line in capsys.readouterr().out.split()} == drawn
    for file in tmp_path.glob("*.svg"):
        ElementTree.parse(file)
