"""Routing rows on the wire: base64, element types, and conversion between all hidden layers and MoE layers.

Only this module turns external ids into stored rows: shape and range are checked before any cast.
"""

from __future__ import annotations

import binascii

import numpy as np
import pybase64

from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

WIRE_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int16", "int32")}
"""Element types that dialects may name, all little-endian."""

_MAX_ROWS, _MAX_PER_ROW = 2**31, 2**16


def to_base64(array: np.ndarray) -> str:
    """Encode the C-order bytes of an array, in the byte order of its dtype."""
    return pybase64.b64encode_as_string(np.ascontiguousarray(array).tobytes())


def from_base64(encoded: object, name: str = "routed_experts") -> bytes:
    """Decode text. Raises ValueError with the field's name if it is not text or has characters outside the alphabet."""
    if not isinstance(encoded, str):
        raise ValueError(f"{name} must be a base64 string")
    try:
        return pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not valid base64") from error


def read_shape(shape: object) -> tuple[int, int, int] | None:
    """Return a shape [rows, layers, k] from JSON, or None if it is not such a shape."""
    if not isinstance(shape, list | tuple) or len(shape) != 3 or not set(map(type, shape)) <= {int}:
        return None
    rows, layers, top_k = shape
    possible = 0 <= rows < _MAX_ROWS and 0 <= layers < _MAX_PER_ROW and 0 <= top_k < _MAX_PER_ROW
    return (rows, layers, top_k) if possible else None


def check_rows(routing: RoutedExperts, layout: RoutingLayout) -> None:
    """Assert that rows have the layout's shape and dtype."""
    rows = routing.rows
    assert rows.shape[1:] == layout.row_shape, f"routing rows {rows.shape} do not fit {layout.row_shape}"
    assert rows.dtype == layout.dtype, f"routing rows are {rows.dtype}, the layout has {layout.dtype}"


def over_hidden_layers(routing: RoutedExperts, layout: RoutingLayout, *, dtype: np.dtype) -> np.ndarray:
    """Return the rows as [N, hidden layers, k] in `dtype`, with zeros in layers without routing."""
    check_rows(routing, layout)
    if len(layout.layer_ids) == layout.num_hidden_layers:
        return routing.rows.astype(dtype, copy=False)
    wide = np.zeros((len(routing.rows), layout.num_hidden_layers, layout.top_k), dtype)
    wide[:, list(layout.layer_ids)] = routing.rows
    return wide


def rows_from_hidden_layers(ids: np.ndarray, layout: RoutingLayout) -> np.ndarray:
    """Return ids [N, hidden layers, k] as stored rows. Raises ValueError if a layer without routing holds an id."""
    if ids.shape[1:] != (layout.num_hidden_layers, layout.top_k):
        raise ValueError(
            f"routed_experts has rows of {_product(ids)} ids, not of {layout.num_hidden_layers} hidden layers "
            f"x {layout.top_k} ids"
        )
    if len(layout.layer_ids) < layout.num_hidden_layers:
        routes = np.zeros(layout.num_hidden_layers, np.bool_)
        routes[list(layout.layer_ids)] = True
        if ids[:, ~routes].any():
            raise ValueError("routed_experts has ids in a layer that does not route: it must be filled with zeros")
        ids = ids[:, routes]
    return stored_rows(ids, layout)


def stored_rows(ids: np.ndarray, layout: RoutingLayout) -> np.ndarray:
    """Return ids [N, MoE layers, k] of any integer type in the store's dtype. Raises ValueError for invalid ids or
    shapes.
    """
    if ids.shape[1:] != layout.row_shape:
        moe_layers, top_k = layout.row_shape
        raise ValueError(
            f"routed_experts has rows of {_product(ids)} ids, not of {moe_layers} MoE layers x {top_k} ids"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= layout.num_experts):
        raise ValueError(f"routed_experts has an id outside [0, {layout.num_experts})")
    return ids.astype(layout.dtype, copy=False)


def _product(ids: np.ndarray) -> str:
    return " x ".join(str(size) for size in ids.shape[1:])
