"""Tables of step times estimated from schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table

NOTE = (
    "Estimated from schedules, not measured. In brackets: without the {overhead} us that each op costs beyond its "
    "work, which no device has confirmed."
)


NUM_SHOWN = 3
"""Ops of a layer, those that cost most; the result file has more."""


def step_estimate(cases: Mapping[str, Any]) -> str:
    """A row per step, then the ops that cost most in a layer of each."""
    first = next(iter(cases.values()))
    rows = [[case, found["compiled_layers"], *_step(found)] for case, found in cases.items()]
    heading = [
        "step",
        "layers compiled",
        "ops a layer",
        "ops under 1 us",
        "bundles a layer",
        "HBM a layer, MB",
        "layer, us",
        "step, ms",
    ]
    steps = markdown_table([*heading, "roofline, ms", "bound", "share of roofline"], rows)
    ops = [[case, *_op(op)] for case, found in cases.items() for op in found["ops_in_layer"][:NUM_SHOWN]]
    named = markdown_table(
        ["costliest in a layer of", "scope", "source", "op", "times", "us", "bundles", "HBM, MB"], ops
    )
    return "\n\n".join([NOTE.format(overhead=first["overhead_us"]), steps, named])


def _step(found: Mapping[str, Any]) -> list[str]:
    layer, step = found["layer"], found["step"]
    return [
        f"{layer['num_ops']:.0f}",
        f"{layer['small_ops']:.0f}",
        f"{layer['bundles']:,.0f}",
        f"{layer['hbm_bytes'] / 1e6:,.1f}",
        f"{layer['seconds'] * 1e6:,.1f} ({layer['bare_seconds'] * 1e6:,.1f})",
        f"{step['seconds'] * 1e3:,.2f} ({step['bare_seconds'] * 1e3:,.2f})",
        f"{max(found['roofline'].values()) * 1e3:,.2f}",
        found["bound"],
        f"{found['share_of_roofline']:.0%} ({found['bare_share_of_roofline']:.0%})",
    ]


def _op(op: Mapping[str, Any]) -> list[str]:
    return [
        op["scope"] or "-",
        op["source"] or "-",
        op["name"],
        f"{op['times']:.0f}",
        f"{op['us']:,.1f} ({op['bare_us']:,.1f})",
        f"{op['bundles']:,.0f}",
        f"{op['hbm_bytes'] / 1e6:,.2f}",
    ]
