"""The packed dialect of prime-rl and SkyRL: `{"data", "shape", "start", "dtype"}`, `data` first, base64 of small ints.

Rows are `[rows, hidden layers, k]`. Clients search for the literal bytes `"routed_experts":{"data":"` in compact JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rayserve_moe.replay.encoding.wire_rows import (
    WIRE_DTYPES,
    from_base64,
    over_hidden_layers,
    read_shape,
    rows_from_hidden_layers,
    to_base64,
)
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

_CAPACITY = {"uint8": 2**8, "uint16": 2**16, "int16": 2**15, "int32": 2**31}


def encode(routing: RoutedExperts, layout: RoutingLayout, *, dtype: str | None = None) -> dict | None:
    """Return the rows in the packed dialect, or None if any row is missing.

    Ids are uint8 up to 256 experts and uint16 above, or of `dtype`. Raises ValueError if that cannot hold them.
    """
    if routing.missing:
        return None
    name = layout.dtype.name if dtype is None else dtype
    if name not in WIRE_DTYPES or layout.num_experts > _CAPACITY[name]:
        raise ValueError(f"the requested dtype cannot hold the ids of {layout.num_experts} experts")
    rows = over_hidden_layers(routing, layout, dtype=WIRE_DTYPES[name])
    return {"data": to_base64(rows), "shape": list(rows.shape), "start": routing.start, "dtype": name}


def decode(value: object, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Return the rows of a packed object; its own `start` takes precedence over the argument."""
    ids, own_start = packed_ids(value)
    return RoutedExperts(rows_from_hidden_layers(ids, layout), start if own_start is None else own_start)


def packed_ids(value: object) -> tuple[np.ndarray, int | None]:
    """Return ids [rows, hidden layers, k] and the start, if given; `dtype` defaults to uint8."""
    if not isinstance(value, Mapping):
        raise ValueError('routed_experts must be an object of "data", "shape", "start", "dtype"')
    shape, name, start = read_shape(value.get("shape")), value.get("dtype", "uint8"), value.get("start")
    if not isinstance(name, str) or name not in WIRE_DTYPES:
        raise ValueError(f"routed_experts.dtype must be one of {', '.join(WIRE_DTYPES)}")
    if shape is None:
        raise ValueError("routed_experts.shape must be three sizes")
    if start is not None and (type(start) is not int or start < 0):
        raise ValueError("routed_experts.start must be a position")
    raw, dtype = from_base64(value.get("data")), WIRE_DTYPES[name]
    if len(raw) != shape[0] * shape[1] * shape[2] * dtype.itemsize:
        raise ValueError("routed_experts.data has a length that does not match its shape and dtype")
    return np.frombuffer(raw, dtype).reshape(shape), start
