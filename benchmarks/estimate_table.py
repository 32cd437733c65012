"""Tables of step times estimated from schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table

NOTE = (
    "Estimated from schedules, not measured. At the peaks of the specification, peers' kernels whose device times are "
    "published run at 0.85 to 0.87 of such estimates where they stream weights, at 0.5 to 0.9 where they copy pages, "
    "at 0.46 to 0.76 in prefill attention, and 13 to 17 us later per collective of XLA. The calibrated time takes this "
    "in; its range is the spread of the published times. The bound is the hardware's: bytes of the fullest device over "
    "peak HBM bandwidth, operations over the matrix peak, or one row per token and device over the links."
)
STEP_RATIOS = (1.15, 1.8)
"""Range of calibrated time / time at peak of whole decode steps, for results that have the time at peak alone."""


NUM_SHOWN = 3
"""Ops of a layer, those that cost most; the result file has more."""


def step_estimate(cases: Mapping[str, Any]) -> str:
    """Render a row per step, then the ops that cost most in a layer of each."""
    rows = [[case, found["compiled_layers"], *_step(found)] for case, found in cases.items()]
    heading = [
        "step",
        "layers compiled",
        "ops a layer",
        "bundles a layer",
        "HBM a layer, MB",
        "layer at peak, us",
        "step at peak, ms",
        "step calibrated, ms",
        "bound of the hardware, ms",
        "bound",
        "share of the bound",
        "share of the matrix peak",
    ]
    steps = markdown_table(heading, rows)
    ops = [[case, *_op(op)] for case, found in cases.items() for op in found["ops_in_layer"][:NUM_SHOWN]]
    titles = ["costliest in a layer of", "scope", "source", "op", "times", "at peak, us", "calibrated, us", "bundles"]
    return "\n\n".join([NOTE, steps, markdown_table([*titles, "HBM, MB"], ops)])


def milliseconds(step: Mapping[str, Any]) -> str:
    """Return a step's calibrated range in ms; without one, the time at peak times `STEP_RATIOS`."""
    return " to ".join(f"{seconds * 1e3:,.1f}" for seconds in _range(step))


def share(bound_s: float, step: Mapping[str, Any]) -> str:
    """Return a bound over a step's calibrated range."""
    least, greatest = _range(step)
    return f"{bound_s / greatest:.0%} to {bound_s / least:.0%}"


def _range(step: Mapping[str, Any]) -> tuple[float, float]:
    if "min_seconds" in step:
        return step["min_seconds"], step["max_seconds"]
    low, high = STEP_RATIOS
    return step["seconds"] * low, step["seconds"] * high


def _step(found: Mapping[str, Any]) -> list[str]:
    layer, step, bound_s = found["layer"], found["step"], max(found["roofline"].values())
    return [
        f"{layer['num_ops']:.0f}",
        f"{layer['bundles']:,.0f}",
        f"{layer['hbm_bytes'] / 1e6:,.1f}",
        f"{layer['peak_seconds'] * 1e6:,.1f}",
        f"{step['peak_seconds'] * 1e3:,.2f}",
        f"{step['seconds'] * 1e3:,.1f} ({milliseconds(step)})",
        f"{bound_s * 1e3:,.2f}",
        found["bound"],
        f"{found['share_of_roofline']:.0%} ({share(bound_s, step)})",
        f"{found['share_of_matrix_peak']:.1%}",
    ]


def _op(op: Mapping[str, Any]) -> list[str]:
    return [
        op["scope"] or "-",
        op["source"] or "-",
        op["name"],
        f"{op['times']:.0f}",
        f"{op['peak_us']:,.1f}",
        f"{op['us']:,.1f}",
        f"{op['bundles']:,.0f}",
        f"{op['hbm_bytes'] / 1e6:,.2f}",
    ]
