"""The sglang dialect: base64 of little-endian int32, flat `[rows, hidden layers, k]`, dense layers filled with zeros.

`POST /generate` and sgl-jax's chat carry it in `meta_info.routed_experts`, with its start in another field.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rayserve_moe.replay.encoding.wire_rows import (
    WIRE_DTYPES,
    from_base64,
    over_hidden_layers,
    rows_from_hidden_layers,
    to_base64,
)
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

_WIRE_DTYPE = WIRE_DTYPES["int32"]


def encode(routing: RoutedExperts, layout: RoutingLayout) -> str | None:
    """Return the rows in the sglang dialect, or None if any row is missing: zeros never stand for missing data."""
    if routing.missing:
        return None
    return to_base64(over_hidden_layers(routing, layout, dtype=_WIRE_DTYPE))


def decode(value: object, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Return the rows of a field whose first row is at position `start`."""
    return RoutedExperts(rows_from_hidden_layers(decode_routed_experts(value, layout), layout), start)


def decode_routed_experts(encoded: object, layout: RoutingLayout) -> np.ndarray:
    """Decode the sglang dialect to int32 [rows, hidden layers, k]. Raises ValueError if the length does not fit."""
    flat = flat_ids(from_base64(encoded))
    row_size = layout.num_hidden_layers * layout.top_k
    if len(flat) % row_size:
        raise ValueError(f"routed_experts holds {len(flat)} ids, which is not a multiple of {row_size} ids per row")
    return flat.reshape(-1, layout.num_hidden_layers, layout.top_k)


def flat_ids(raw: bytes) -> np.ndarray:
    """Read bytes as int32, flat."""
    if len(raw) % _WIRE_DTYPE.itemsize:
        raise ValueError(f"routed_experts holds {len(raw)} bytes, which are not whole int32 values")
    return np.frombuffer(raw, _WIRE_DTYPE).astype(np.int32)


def extract_routed_experts_from_meta_info(answer: Mapping) -> np.ndarray:
    """Decode `answer["meta_info"]["routed_experts"]` to int32, flat; reshape it to [rows, hidden layers, k].

    `answer` is an object of a `/generate` answer, a choice of an OpenAI answer, or a result of `Engine.generate`.
    Raises ValueError with the reason if it has no routing.
    """
    meta_info = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta_info, Mapping):
        raise ValueError("expected one answer with a meta_info object (take one element of a batch answer)")
    if "routed_experts" not in meta_info:
        raise ValueError("meta_info has no routed_experts: set return_routed_experts=true in the request")
    encoded = meta_info["routed_experts"]
    if encoded is None:
        description = meta_info.get("routed_experts_info") or {}
        raise ValueError(f"routed_experts is null: rows are missing at positions {description.get('missing')}")
    return flat_ids(from_base64(encoded))
