"""Tables of `benchmarks.invariance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import rate, speed_ratio
from benchmarks.markdown import markdown_table
from benchmarks.workloads import WORKLOADS

KERNELS = ("native", "xla")


def invariance(found: Mapping[str, Any]) -> str:
    """Render the log-probs that scoring does not reproduce, then rates with the setting on and off."""
    rows = [
        [side, each["versions"], f"{each['tokens']:,}", f"{each['differing']:,}", f"{each['ratio_not_1']:,}",
         f"{each['largest']:.1e}"]
        for side, each in found["equality"].items()
    ]  # fmt: skip
    heading = [
        "kernels, setting",
        "versions",
        "tokens",
        "other log-probs",
        "ratios that are not 1",
        "largest difference",
    ]
    equality = markdown_table(heading, rows)
    if "cost" not in found:
        return equality
    costs = [
        [name, WORKLOADS[name], kernels, *(rate(count, runs[f"{kernels} {side}"]) for side in ("on", "off")),
         speed_ratio(runs[f"{kernels} on"], runs[f"{kernels} off"])]
        for name, runs in found["cost"]["runs"].items()
        for count in [WORKLOADS[name].total_new_tokens]
        for kernels in KERNELS
    ]  # fmt: skip
    return f"{equality}\n\n{markdown_table(['', 'workload', 'kernels', 'on, tokens/s', 'off', 'on / off'], costs)}"
