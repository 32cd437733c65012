"""What updates of weights look like as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import spread
from benchmarks.markdown import markdown_table

TITLES = {"devices": "on the devices, beside the old ones", "host": "in host memory"}


def weight_updates(measured: Mapping[str, Any]) -> str:
    """Render updates by where the new weights wait: all of it, the swap, and the longest from one step to the next."""
    rows = [
        [
            TITLES[name],
            spread(run["update_s"] for run in runs),
            spread(1e3 * run["swap_s"] for run in runs),
            spread(1e3 * run["step_s"] for run in runs),
            spread(1e3 * run["longest_quiet_s"] for run in runs),
            spread(1e3 * run["longest_s"] for run in runs),
            spread(run["longest_s"] / run["step_s"] for run in runs),
        ]
        for name, runs in measured["runs"].items()
    ]
    heading = [
        "new weights wait",
        "update, s",
        "swap, ms",
        "step, ms",
        "longest step without an update, ms",
        "longest during one, ms",
        "longest / step",
    ]
    table = markdown_table(heading, rows)
    return f"Weights of {measured['bytes_per_device'] / 1e6:,.0f} MB per device.\n\n{table}"
