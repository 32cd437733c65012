"""Tables of `python -m benchmarks.fleet_routing`, `router_time`, `fleet_simulation` and `fleet_validation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table


def fleet_routing(measured: Mapping[str, Any]) -> str:
    """Render policies by number of replicas."""
    heading = ("replicas", "policy", "computed / one cache", "TTFT p50, s", "TTFT p99, s", "busiest / mean")
    rows = [
        (
            row["num_replicas"],
            row["policy"],
            f"{row['recomputed']:.3f}",
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['busiest']:.2f}",
        )
        for row in measured["rows"]
    ]
    title = f"{measured['num_requests']} requests and more, pages of {measured['page_size']}, on a computed clock"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def router_time(measured: Mapping[str, Any]) -> str:
    """Render milliseconds by kind of body."""
    heading = ("body", "tokens", "p50, ms", "p99, ms")
    rows = [
        (row["kind"], f"{row['num_tokens']:,}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}")
        for row in measured["rows"]
    ]
    title = f"{measured['num_replicas']} replicas, pages of {measured['page_size']}"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


COMPARED = {
    "TTFT p50, ms": ("ttft_p50_s", 1e3),
    "TTFT p99, ms": ("ttft_p99_s", 1e3),
    "between events p50, ms": ("gap_p50_s", 1e3),
    "between events p99, ms": ("gap_p99_s", 1e3),
    "time per token p50, ms": ("tpot_p50_s", 1e3),
    "time per token p99, ms": ("tpot_p99_s", 1e3),
    "tokens/s of a replica": ("tokens_s", 1.0),
    "prompt tokens found cached": ("hits", 1.0),
}


def fleet_validation(measured: Mapping[str, Any]) -> str:
    """Render what a fleet did beside what its simulation did."""
    real, simulated = measured["real"], measured["simulated"]
    rows = [
        (name, f"{scale * real[key]:.3g}", f"{scale * simulated[key]:.3g}", f"{simulated[key] / real[key]:.2f}")
        for name, (key, scale) in COMPARED.items()
    ]
    title = f"{measured['num_replicas']} replicas, {measured['size']} model, {measured['rate_s']:.1f} requests/s"
    return f"**{title}**\n\n{markdown_table(('', 'served', 'simulated', 'ratio'), rows)}"


def fleet_simulation(measured: Mapping[str, Any]) -> str:
    """Render policies by number of replicas and rate."""
    heading = (
        "replicas",
        "requests/s each",
        "for s",
        "policy",
        "good",
        "TTFT p50, s",
        "p99",
        "ms/token p50",
        "p99",
        "cached",
    )
    rows = [
        (
            f"{row['num_replicas']:,}",
            f"{row['rate']:g}",
            f"{row['seconds']:.0f}",
            row["policy"],
            f"{row['good_share']:.1%}",
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{1e3 * row['tpot_p50_s']:.1f}",
            f"{1e3 * row['tpot_p99_s']:.1f}",
            f"{row['hits']:.1%}",
        )
        for row in measured["rows"]
    ]
    bounds = f"good: first token in {measured['ttft_s']:g} s, others in {1e3 * measured['tpot_s']:g} ms on average"
    title = f"{measured['replica']}, {measured['asked']}; {bounds}; on a computed clock"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"
