"""The figures of balanced selection as tables: its time beside the definition, and what its limits buy and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import paired_ratio, spread
from benchmarks.markdown import markdown_table

MODES = ("topk", "replicas_only (shares)", "replicas_only (capacity)", "balanced")
TIME_TARGETS = {"1.0": (5.0, None), "2.0": (3.0, 10.0)}
"""By factor: how many times as fast as the definition, and in how many milliseconds."""


def balanced_selection(measured: Mapping[str, Any]) -> str:
    """Render times by skew and factor, then rank loads and assignments kept by skew, factor and mode."""
    before = f"{measured['cores']} cores; load average of the machine before the start: {measured['load_before']}."
    return "\n\n".join((_times(measured["times"]), *map(_balance, measured["balance"].items()), before))


def _times(times: Mapping[str, Any]) -> str:
    rows = []
    for skew, by_factor in times.items():
        for factor, found in by_factor.items():
            speedup, most_ms = TIME_TARGETS.get(factor, ("", None))
            target = f">= {speedup:g} times" if speedup else ""
            rows.append(
                [
                    skew,
                    factor,
                    spread(found["oracle_ms"]),
                    spread(found["device_ms"]),
                    paired_ratio(found["oracle_ms"], found["device_ms"]),
                    f"{target}, <= {most_ms:g} ms" if most_ms else target,
                    f"{found['kept_share']:.3f}",
                    found["unfilled"],
                ]
            )
    heading = ["skew", "factor", "definition, ms", "selection, ms", "times as fast", "goal", "kept", "unfilled"]
    return markdown_table(heading, rows)


def _balance(of_skew: tuple[str, Mapping[str, Any]]) -> str:
    skew, modes = of_skew
    factors = list(modes["balanced"])
    rows = [
        [
            factor,
            *(spread(point["imbalance"] for point in modes[mode][factor]) for mode in MODES),
            spread(point["kept_share"] for point in modes["balanced"][factor]),
            spread(point["unfilled"] for point in modes["balanced"][factor]),
        ]
        for factor in factors
    ]
    loads = [f"hottest / mean rank, {mode}" for mode in MODES]
    return markdown_table([f"{skew}: factor", *loads, "kept share, balanced", "unfilled, balanced"], rows)
