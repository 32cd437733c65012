"""What differences of bfloat16 routing look like as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table

PAIRS = {
    "eager / grouped_mm": "eager | grouped_mm",
    "native / eager": "native | eager",
    "native / grouped_mm": "native | grouped_mm",
    "float32 routers: eager / grouped_mm": "eager, float32 router | grouped_mm, float32 router",
    "native / eager, float32 router": "native | eager, float32 router",
    "float32 / eager": "float32 | eager",
    "float32 / native": "native | float32",
}
"""Titles of columns, and the pair that each compares."""


def bfloat16_routing(measured: Mapping[str, Any]) -> str:
    """Render shares of token-layers with other sets of experts, by family and pair; empty: as without it."""
    rows = [
        [family, found["token_layers"], *(_share(found["differing"].get(pair)) for pair in PAIRS.values())]
        for family, found in measured["families"].items()
    ]
    return markdown_table(["other sets of experts", "token-layers", *PAIRS], rows)


def _share(differing: float | None) -> str:
    return "" if differing is None else f"{differing:.2%}"
