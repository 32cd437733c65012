"""The charts of a result file, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.chart import Chart, Series
from benchmarks.figures import BUSY_LOAD, HOST_PARTS, Run, Spread, load_before, milliseconds_per_step, spread
from benchmarks.peers.tables import peers_chart
from rayserve_moe.tools.estimate.rates import STEP_SPREAD

RUNNING = "running sequences"


def charts(result: dict[str, Any]) -> dict[str, Chart]:
    """Return the charts of one result by the endings of their file names; each says where the machine was busy."""
    load = load_before(result)
    note = f"busy machine: load average {load:.1f} before the start" if load > BUSY_LOAD else ""
    found = {suffix: chart for key, of in CHARTS.items() if key in result for suffix, chart in of(result[key]).items()}
    return {suffix: replace(chart, note=note) for suffix, chart in found.items()}


def _host_time(points: Mapping[str, Any]) -> dict[str, Chart]:
    def line(part: str) -> list[tuple[float, Spread]]:
        return [
            (float(count), Spread(parts[part]["median"], parts[part]["min"], parts[part]["max"]))
            for count, parts in points.items()
        ]

    series = [Series("together", line("host")), *(Series(part, line(part)) for part in HOST_PARTS)]
    return {"host": Chart("Host time of a decode step", RUNNING, "microseconds per step", series)}


def _curve(points: Mapping[str, Sequence[Run]]) -> dict[str, Chart]:
    def line(value: Callable[[Sequence[Run]], Spread]) -> list[tuple[float, Spread]]:
        return [(float(count), value(runs)) for count, runs in points.items()]

    rates = line(lambda runs: spread(run["tokens_sampled"] / run["seconds"] for run in runs))
    steps = line(lambda runs: spread(1e3 * run["seconds"] / run["steps"] for run in runs))
    host = line(lambda runs: milliseconds_per_step(runs, HOST_PARTS))
    return {
        "tokens": Chart(
            "Tokens per second, decoding together", RUNNING, "tokens/s", [Series("tiny model", rates)], log_x=True
        ),
        "steps": Chart(
            "Time of a decode step, tiny model",
            RUNNING,
            "milliseconds per step",
            [Series("whole step", steps), Series("schedule, pack and commit", host)],
        ),
        "host": Chart(
            "Host time of a decode step, tiny model",
            RUNNING,
            "milliseconds per step",
            [Series("schedule, pack and commit", host)],
        ),
    }


MADE_UP_SLICE = "v6e:2x4"


def _made_up(models: Mapping[str, Any]) -> dict[str, Chart]:
    """Draw tokens per second and chip of each model; a bar is the range that published device times leave."""

    def line(rows: Mapping[str, Any]) -> list[tuple[float, Spread]]:
        rates = {float(count): one["tokens_per_s"] / one["chips"] for count, one in rows.items()}
        low, high = STEP_SPREAD.min_ratio, STEP_SPREAD.max_ratio
        return [(count, Spread(rate, rate / high, rate / low)) for count, rate in rates.items()]

    rows = {name: found["plans"].get(MADE_UP_SLICE) for name, found in models.items()}
    series = [Series(name, line(of_slice)) for name, of_slice in rows.items() if of_slice]
    title = f"Planned for models that do not exist, {MADE_UP_SLICE}"
    return {"tokens": Chart(title, "requests at once", "tokens/s and chip", series, log_x=True)}


def _selection(measured: Mapping[str, Any]) -> dict[str, Chart]:
    skew = measured["drawn_skew"]
    modes = measured["balance"][skew]

    def lines(value: str) -> list[Series]:
        return [
            Series(
                mode,
                [(float(f), spread(point[value] for point in points)) for f, points in by_factor.items()],
            )
            for mode, by_factor in modes.items()
        ]

    factor = "capacity factor"
    return {
        "imbalance": Chart(
            f"Rank loads, popularities {skew}", factor, "hottest rank / mean rank", lines("imbalance"), log_y=True
        ),
        "kept": Chart(
            f"Assignments kept, popularities {skew}", factor, "share of the top 8 that is kept", lines("kept_share")
        ),
    }


def _fleet(simulated: Mapping[str, Any]) -> dict[str, Chart]:
    """Render rates at the most frequent number of replicas, and numbers of replicas at the most frequent rate."""
    rows = simulated["rows"]
    numbers, rates = ({row[name] for row in rows} for name in ("num_replicas", "rate"))
    number = max(sorted(numbers), key=lambda each: sum(row["num_replicas"] == each for row in rows))
    rate = max(sorted(rates), key=lambda each: len({row["num_replicas"] for row in rows if row["rate"] == each}))

    def lines(by: str, kept: Mapping[str, float], value: str, scale: float) -> list[Series]:
        found: dict[str, list[tuple[float, Spread]]] = {}
        for row in rows:
            if all(row[name] == wanted for name, wanted in kept.items()):
                found.setdefault(row["policy"], []).append((row[by], spread([scale * row[value]])))
        return [Series(policy, sorted(points, key=lambda point: point[0])) for policy, points in found.items()]

    asked = f"{simulated['replica']}, {simulated['asked']}"
    by_rate, by_number = ("requests_s", {"num_replicas": number}), ("num_replicas", {"rate": rate})
    return {
        "goodput": Chart(
            f"{number} replicas: {asked}",
            "requests/s that came to each",
            "good requests/s of each",
            lines(*by_rate, "goodput_s", 1.0),
        ),
        "ttft": Chart(
            f"{rate:g} requests/s each: {asked}",
            "replicas",
            "p99 of seconds to the first token",
            lines(*by_number, "ttft_p99_s", 1.0),
            log_x=True,
        ),
        "hits": Chart(
            f"{rate:g} requests/s each: {asked}",
            "replicas",
            "% of prompt tokens found cached",
            lines(*by_number, "hits", 100.0),
            log_x=True,
        ),
    }


CHARTS: dict[str, Callable[[Any], dict[str, Chart]]] = {
    "host_us": _host_time,
    "curve": _curve,
    "balanced_selection": _selection,
    "peers": peers_chart,
    "fleet_simulation": _fleet,
    "made_up": _made_up,
}
"""By the key of a result file under which the figures lie."""
