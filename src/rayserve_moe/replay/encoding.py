"""Routed experts on the wire: the sglang dialect, its decoder, and the description that goes with every answer.

Rows travel as base64 of little-endian int32, flat `[rows, hidden layers, k]`; layers that do not route are zeros
and are named by their absence from `layer_ids`. Choosing which rows to send is the caller's business.
"""

from __future__ import annotations

import binascii
import zlib
from collections.abc import Mapping

import numpy as np
import pybase64

from rayserve_moe.requests import RoutedExperts, RoutingLayout

_WIRE_DTYPE = np.dtype("<i4")


def encode_routed_experts(routing: RoutedExperts, layout: RoutingLayout) -> str | None:
    """Return the rows in the sglang dialect, or None when any row is missing: zeros never stand in for data."""
    if routing.missing:
        return None
    _check_rows(routing, layout)
    wire = np.zeros((len(routing.rows), layout.num_hidden_layers, layout.top_k), _WIRE_DTYPE)
    wire[:, list(layout.layer_ids)] = routing.rows
    return pybase64.b64encode(wire.tobytes()).decode("ascii")


def decode_routed_experts(encoded: str, layout: RoutingLayout) -> np.ndarray:
    """Decode the sglang dialect to int32 [rows, hidden layers, k]; ValueError where the length does not fit."""
    flat = _decode_flat(encoded)
    row_size = layout.num_hidden_layers * layout.top_k
    if len(flat) % row_size:
        raise ValueError(f"routed_experts holds {len(flat)} ids, which is no multiple of {row_size} ids per row")
    return flat.reshape(-1, layout.num_hidden_layers, layout.top_k)


def extract_routed_experts_from_meta_info(answer: Mapping) -> np.ndarray:
    """Decode `answer["meta_info"]["routed_experts"]` to int32, flat; reshape it to [rows, hidden layers, k].

    `answer` is one object of a `/generate` answer, one choice of an OpenAI answer, or what `Engine.generate`
    returned. ValueError says why when there is no routing in it.
    """
    meta_info = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta_info, Mapping):
        raise ValueError("expected one answer with a meta_info object (take one element of a batch answer)")
    if "routed_experts" not in meta_info:
        raise ValueError("meta_info has no routed_experts: ask for it with return_routed_experts=true")
    encoded = meta_info["routed_experts"]
    if encoded is None:
        description = meta_info.get("routed_experts_info") or {}
        raise ValueError(f"routed_experts is null: rows are missing at positions {description.get('missing')}")
    return _decode_flat(encoded)


def routed_experts_info(routing: RoutedExperts, layout: RoutingLayout) -> dict:
    """Describe the rows: shape, ids, checksum, and per range of positions what is missing and where it came from.

    The checksum covers the C-order little-endian bytes of the MoE rows in the store's dtype, so it is the same in
    every dialect; it is None when a row is missing, for then these bytes do not exist.
    """
    _check_rows(routing, layout)
    stored = np.ascontiguousarray(routing.rows, layout.dtype.newbyteorder("<"))
    return {
        "shape": list(routing.rows.shape),
        "dtype": layout.dtype.name,
        "start": routing.start,
        "layer_ids": list(layout.layer_ids),
        "num_experts": layout.num_experts,
        "id_space": "logical",
        "crc32": None if routing.missing else zlib.crc32(stored.tobytes()),
        "missing": [list(entry) for entry in routing.missing],
        "source": [list(entry) for entry in routing.source],
        "weight_version": [list(entry) for entry in routing.weight_version],
    }


def routing_from(routing: RoutedExperts, start: int) -> RoutedExperts:
    """Return the same routing without its rows before position `start` (which may lie past the last row)."""
    if start <= routing.start:
        return routing
    return RoutedExperts(
        rows=routing.rows[start - routing.start :],
        start=start,
        missing=_ranges_from(routing.missing, start),
        source=_ranges_from(routing.source, start),
        weight_version=_ranges_from(routing.weight_version, start),
    )


def _ranges_from(ranges: tuple, start: int) -> tuple:
    return tuple((max(first, start), last, *label) for first, last, *label in ranges if last > start)


def _check_rows(routing: RoutedExperts, layout: RoutingLayout) -> None:
    rows = routing.rows
    assert rows.shape[1:] == layout.row_shape, f"routing rows {rows.shape} do not fit {layout.row_shape}"
    assert rows.dtype == layout.dtype, f"routing rows are {rows.dtype}, the layout says {layout.dtype}"


def _decode_flat(encoded: object) -> np.ndarray:
    if not isinstance(encoded, str):
        raise ValueError("routed_experts must be a base64 string")
    try:
        raw = pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("routed_experts is not valid base64") from error
    if len(raw) % _WIRE_DTYPE.itemsize:
        raise ValueError(f"routed_experts holds {len(raw)} bytes, which are not whole int32 values")
    return np.frombuffer(raw, _WIRE_DTYPE).astype(np.int32)
