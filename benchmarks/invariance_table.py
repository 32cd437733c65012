"""Tables of `benchmarks.invariance`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.figures import rate, speed_ratio
from benchmarks.markdown import markdown_table
from benchmarks.workloads import WORKLOADS

KERNELS, SIDES = ("native", "xla"), ("on", "off")


def invariance(found: Mapping[str, Any]) -> str:
    """Render the log-probs that scoring does not reproduce, rates on CPUs, and steps of TPUs, with on and off."""
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
    return "\n\n".join([equality, *_costs(found), *_tpus(found)])


def _costs(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rates of workloads on CPUs, if they were measured."""
    if "cost" not in found:
        return
    costs = [
        [name, WORKLOADS[name], kernels, *(rate(count, runs[f"{kernels} {side}"]) for side in ("on", "off")),
         speed_ratio(runs[f"{kernels} on"], runs[f"{kernels} off"])]
        for name, runs in found["cost"]["runs"].items()
        for count in [WORKLOADS[name].total_new_tokens]
        for kernels in KERNELS
    ]  # fmt: skip
    yield markdown_table(["", "workload", "kernels", "on, tokens/s", "off", "on / off"], costs)


def _tpus(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the estimated steps of TPUs, if there are any."""
    rows = [
        [name, sides["on"]["compiled_layers"], *(f"{sides[side]['step']['seconds'] * 1e3:,.2f}" for side in SIDES),
         f"{sides['on']['step']['seconds'] / sides['off']['step']['seconds']:.2f}"]
        for name, sides in found.get("tpus", {}).items()
        if {*SIDES} <= {*sides}
    ]  # fmt: skip
    if rows:
        yield markdown_table(["step of TPUs, estimated", "layers compiled", "on, ms", "off, ms", "on / off"], rows)
