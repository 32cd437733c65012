"""`routed_experts_info`, the description in every answer: built from rows, and verified against decoded rows."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from rayserve_moe.replay.encoding.wire_rows import check_rows, read_shape
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

_MAX_EXPERTS = 2**16


def routed_experts_info(routing: RoutedExperts, layout: RoutingLayout) -> dict:
    """Describe the rows: shape, ids, checksum, and missing rows and sources by ranges of positions.

    The checksum covers the C-order little-endian bytes of the MoE rows in the store's dtype, so it is the same in every
    dialect. It is None if a row is missing, because these bytes do not exist then.
    """
    check_rows(routing, layout)
    return {
        "shape": list(routing.rows.shape),
        "dtype": layout.dtype.name,
        "start": routing.start,
        "layer_ids": list(layout.layer_ids),
        "num_experts": layout.num_experts,
        "id_space": "logical",
        "crc32": None if routing.missing else checksum(routing.rows),
        "missing": [list(entry) for entry in routing.missing],
        "source": [list(entry) for entry in routing.source],
        "weight_version": [list(entry) for entry in routing.weight_version],
    }


def checksum(rows: np.ndarray) -> int:
    """Return the crc32 of stored rows: C order, little-endian."""
    return zlib.crc32(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes())


def described_layout(description: Mapping, *, num_hidden_layers: int | None = None) -> RoutingLayout:
    """Return the layout of a description. Raises ValueError if it contradicts itself.

    A description does not have the number of hidden layers; the default ends with the last MoE layer.
    """
    layer_ids, num_experts = description.get("layer_ids"), description.get("num_experts")
    _, num_layers, top_k = described_shape(description)
    if not isinstance(layer_ids, list) or not all(_is_count(layer) for layer in layer_ids):
        raise ValueError("routed_experts_info has no list of layer_ids")
    if len(layer_ids) != num_layers or layer_ids != sorted(set(layer_ids)):
        raise ValueError("routed_experts_info has other layers than its rows")
    if not _is_count(num_experts) or not 1 <= num_experts <= _MAX_EXPERTS:
        raise ValueError("routed_experts_info has no num_experts")
    min_hidden = layer_ids[-1] + 1 if layer_ids else 0
    hidden = min_hidden if num_hidden_layers is None else num_hidden_layers
    if hidden < min_hidden:
        raise ValueError("routed_experts_info names a layer that the rows do not have")
    return RoutingLayout(hidden, tuple(layer_ids), num_experts, top_k)


def described_shape(description: Mapping) -> tuple[int, int, int]:
    """Return the shape [rows, MoE layers, k] of a description."""
    shape = read_shape(description.get("shape"))
    if shape is None:
        raise ValueError("routed_experts_info has no shape of three sizes")
    return shape


def described(rows: np.ndarray, description: Mapping) -> RoutedExperts:
    """Return stored rows with their description. Raises ValueError if the two do not match."""
    start = description.get("start")
    if not _is_count(start):
        raise ValueError("routed_experts_info has no start")
    if description.get("id_space") != "logical":
        raise ValueError("routed_experts_info does not have id_space logical")
    if described_shape(description) != rows.shape:
        raise ValueError("routed_experts has another shape than routed_experts_info")
    if description.get("dtype") != rows.dtype.name:
        raise ValueError("routed_experts_info has another dtype than the rows")
    span = (start, start + len(rows))
    routing = RoutedExperts(
        rows=rows,
        start=start,
        missing=_ranges(description, "missing", span=span, label=False),
        source=_ranges(description, "source", span=span, label=True),
        weight_version=_ranges(description, "weight_version", span=span, label=True),
    )
    if not routing.missing and description.get("crc32") != checksum(rows):
        raise ValueError("routed_experts does not match the crc32 in routed_experts_info: rows were altered")
    return routing


def _ranges(description: Mapping, name: str, *, span: tuple[int, int], label: bool) -> tuple[Any, ...]:
    entries = description.get(name)
    if not isinstance(entries, list) or not all(_is_range(entry, span, label) for entry in entries):
        raise ValueError(f"routed_experts_info has ranges of {name} that do not fit its rows")
    if any(before[1] > after[0] for before, after in itertools.pairwise(entries)):
        raise ValueError(f"routed_experts_info has ranges of {name} that overlap")
    return tuple(tuple(entry) for entry in entries)


def _is_range(entry: object, span: tuple[int, int], label: bool) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 + label or not (_is_count(entry[0]) and _is_count(entry[1])):
        return False
    return span[0] <= entry[0] < entry[1] <= span[1] and (not label or isinstance(entry[2], str))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
