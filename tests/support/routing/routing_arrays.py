"""Routings of any shape for hypothesis, and one that looks like a real model's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from rayserve_moe.requests.records import RoutedExperts, RoutingLayout


@st.composite
def layouts(draw: st.DrawFn) -> RoutingLayout:
    """Layouts with and without dense layers, of 1 to 600 experts."""
    num_layers = draw(st.integers(1, 6))
    layer_ids = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    num_experts = draw(st.integers(1, 600) | st.sampled_from([255, 256, 257]))
    return RoutingLayout(num_layers, tuple(sorted(layer_ids)), num_experts, draw(st.integers(1, min(8, num_experts))))


@st.composite
def routed(draw: st.DrawFn, *, max_rows: int = 20, max_start: int = 50) -> tuple[RoutedExperts, RoutingLayout]:
    """Complete routings of distinct ids, some without a row, with sources and weight versions of their ranges."""
    layout = draw(layouts())
    num_rows = draw(st.integers(0, max_rows))
    rows = random_rows(layout, num_rows, seed=draw(st.integers(0, 2**32 - 1)))
    start = draw(st.integers(0, max_start))
    end = start + num_rows
    cut = draw(st.integers(start, end))
    halves = [(first, last) for first, last in ((start, cut), (cut, end)) if first < last]
    source = tuple((*half, label) for half, label in zip(halves, ("computed", "recomputed"), strict=False))
    versions = tuple((*half, label) for half, label in zip(halves, ("7", "8"), strict=False))
    return RoutedExperts(rows, start, source=source, weight_version=versions), layout


@st.composite
def routed_with_gaps(draw: st.DrawFn) -> tuple[RoutedExperts, RoutingLayout]:
    """Routings of which one range of rows, at least, is missing; what lies in it means nothing."""
    routing, layout = draw(routed().filter(lambda case: len(case[0].rows) > 0))
    end = routing.start + len(routing.rows)
    first = draw(st.integers(routing.start, end - 1))
    last = draw(st.integers(first + 1, end))
    return RoutedExperts(routing.rows, routing.start, ((first, last),), routing.source, routing.weight_version), layout


def random_rows(layout: RoutingLayout, num_rows: int, *, seed: int) -> np.ndarray:
    """Rows [N, MoE layers, k] of distinct ids, equally likely."""
    scores = np.random.default_rng(seed).random((num_rows, len(layout.layer_ids), layout.num_experts))
    return np.argsort(scores, axis=-1)[..., : layout.top_k].astype(layout.dtype)


def same(one: RoutedExperts, other: RoutedExperts) -> bool:
    """Whether two routings agree in everything that holds data, types and shapes included."""
    present = np.ones(len(one.rows), np.bool_)
    for first, last in one.missing:
        present[first - one.start : last - one.start] = False
    facts = [(each.start, each.missing, each.source, each.weight_version, each.rows.shape, each.rows.dtype)
             for each in (one, other)]  # fmt: skip
    return facts[0] == facts[1] and np.array_equal(one.rows[present], other.rows[present])


def refusal(call: Callable[[], object]) -> str | None:
    """Return the sentence of the ValueError that a call ends with; None where it returns."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
