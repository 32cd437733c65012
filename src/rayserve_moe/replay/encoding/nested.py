"""The nested dialect of vLLM 0.21: plain JSON lists `[rows][MoE layers][k]`, the prompt's rows separate.

It takes fifteen to seventy times as long as the other dialects; it is for human readers.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from rayserve_moe.replay.encoding.ranges import routing_from, routing_until
from rayserve_moe.replay.encoding.wire_rows import check_rows, stored_rows
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout


def encode(routing: RoutedExperts, layout: RoutingLayout) -> list | None:
    """Return the rows as nested lists, or None if any row is missing."""
    check_rows(routing, layout)
    return None if routing.missing else routing.rows.tolist()


def encode_split(routing: RoutedExperts, layout: RoutingLayout, *, prompt_len: int) -> tuple[list | None, list | None]:
    """Return `prompt_routed_experts` and `routed_experts`: rows of prompt positions, and rows of generated tokens."""
    if routing.missing:
        return None, None
    prompt, generated = routing_until(routing, prompt_len), routing_from(routing, prompt_len)
    return encode(prompt, layout), encode(generated, layout)


def decode(value: object, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Return the rows of nested lists whose first row is at position `start`."""
    rows = stored_rows(nested_ids(value, row_shape=layout.row_shape), layout)
    return RoutedExperts(rows, start)


def nested_ids(value: object, *, row_shape: tuple[int, int]) -> np.ndarray:
    """Read nested lists of plain integers as int64 [rows, MoE layers, k]. Raises ValueError for any other list."""
    num_layers, top_k = row_shape
    rows = _all_lists([value])
    layers = _all_lists(rows, num_layers)
    ids = _all_lists(layers, top_k)
    if not set(map(type, ids)) <= {int}:
        raise ValueError("routed_experts must hold integers only")
    try:
        return np.array(ids, np.int64).reshape(len(rows), num_layers, top_k)
    except OverflowError as error:
        raise ValueError("routed_experts has an id that is not an expert's") from error


def _all_lists(values: list, length: int | None = None) -> list:
    """Return the concatenated elements of lists, each checked to be a list (of `length`)."""
    if not set(map(type, values)) <= {list}:
        raise ValueError("routed_experts must be lists of rows, of layers, of ids")
    if length is not None and not set(map(len, values)) <= {length}:
        raise ValueError(f"routed_experts has a list that is not {length} long")
    return list(chain.from_iterable(values))
