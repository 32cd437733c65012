"""Tables of `python -m benchmarks.fleet_routing` and `router_time`."""

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
