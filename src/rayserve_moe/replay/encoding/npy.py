"""The npy dialect of vLLM: base64 of the bytes of a `.npy` file, `[rows, hidden layers, k]` in the store's dtype."""

from __future__ import annotations

import io
import re

import numpy as np
import pybase64

from rayserve_moe.replay.encoding.wire_rows import from_base64, over_hidden_layers, read_shape, rows_from_hidden_layers
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

MAGIC = b"\x93NUMPY"
_VERSION = b"\x01\x00"
_PREFIX_BYTES = len(MAGIC) + len(_VERSION) + 2
_HEADER = re.compile(
    rb"\{'descr': '(\|u1|<u2|<i2|<i4|<i8)', 'fortran_order': False, "
    rb"'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)
"""The header that numpy writes for three dimensions; nothing else is accepted, and no expression is evaluated."""


def encode(routing: RoutedExperts, layout: RoutingLayout) -> str | None:
    """Return the rows in the npy dialect, or None if any row is missing."""
    if routing.missing:
        return None
    file = io.BytesIO()
    rows = over_hidden_layers(routing, layout, dtype=layout.dtype.newbyteorder("<"))
    np.lib.format.write_array(file, np.ascontiguousarray(rows), version=(1, 0), allow_pickle=False)
    return pybase64.b64encode_as_string(file.getbuffer())


def decode(value: object, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Return the rows of a field whose first row is at position `start`."""
    return RoutedExperts(rows_from_hidden_layers(npy_ids(from_base64(value)), layout), start)


def npy_ids(raw: bytes) -> np.ndarray:
    """Read the bytes of a `.npy` file of three dimensions. Raises ValueError for any other file."""
    if not raw.startswith(MAGIC + _VERSION) or len(raw) < _PREFIX_BYTES:
        raise ValueError("routed_experts is not a .npy file of version 1.0")
    begin = _PREFIX_BYTES + int.from_bytes(raw[_PREFIX_BYTES - 2 : _PREFIX_BYTES], "little")
    header = _HEADER.fullmatch(raw[_PREFIX_BYTES:begin])
    if header is None:
        raise ValueError("routed_experts has a .npy header that is not of integers in three dimensions, C order")
    shape = read_shape([int(size) for size in header.groups()[1:]])
    dtype = np.dtype(header[1].decode("ascii"))
    if shape is None or len(raw) - begin != shape[0] * shape[1] * shape[2] * dtype.itemsize:
        raise ValueError("routed_experts is a .npy file whose length does not match its header")
    return np.frombuffer(raw, dtype, offset=begin).reshape(shape)
