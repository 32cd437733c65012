"""The table of `python -m benchmarks.fleet_routing`."""

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
