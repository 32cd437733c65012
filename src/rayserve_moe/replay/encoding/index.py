"""Index rows of sparse attention in answers: base64 of little-endian int32 [rows, indexer layers, top_k], -1 behind.

Rows of an index of blocks hold numbers of blocks, a row for each layer and head of the index.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rayserve_moe.replay.encoding.ranges import missing_ranges
from rayserve_moe.replay.encoding.wire_rows import WIRE_DTYPES, from_base64, read_shape, to_base64
from rayserve_moe.replay.index_rows import packed_index, unpacked_index
from rayserve_moe.requests.records import IndexLayout, RoutedExperts

_WIRE_DTYPE = WIRE_DTYPES["int32"]


def index_rows_of(routing: RoutedExperts, layout: IndexLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return index rows, int32 [N, indexer layers, top_k], and the mask of known rows, bool [N]; others are -1."""
    packed = np.full(len(routing.rows), None, object) if routing.index is None else routing.index
    known = np.array([row is not None for row in packed], np.bool_)
    for first, last in routing.missing:
        known[first - routing.start : last - routing.start] = False
    rows = np.full((len(packed), len(layout.layer_ids), layout.top_k), -1, np.int32)
    for place in np.flatnonzero(known).tolist():
        rows[place] = unpacked_index(packed[place], num_layers=len(layout.layer_ids), top_k=layout.top_k)
    return rows, known


def encode(routing: RoutedExperts, layout: IndexLayout) -> tuple[str | None, dict]:
    """Return index rows, None if any is missing, and their description."""
    rows, known = index_rows_of(routing, layout)
    wire, is_whole = rows.astype(_WIRE_DTYPE, copy=False), bool(known.all())
    info = {
        "shape": list(rows.shape),
        "dtype": "int32",
        "start": routing.start,
        "layer_ids": list(layout.layer_ids),
        "block_size": layout.block_size,
        "crc32": zlib.crc32(np.ascontiguousarray(wire).tobytes()) if is_whole else None,
        "missing": [list(entry) for entry in missing_ranges(known, routing.start)],
        "weight_version": [list(entry) for entry in routing.weight_version],
    }
    return to_base64(wire) if is_whole else None, info


def decode_each_forced_index(
    value: object, forced: Sequence[RoutedExperts | None], *, layout: IndexLayout | None, is_batch: bool
) -> list[RoutedExperts | None]:
    """Add the choices of `forced_indexer_topk` to the forced routing of every prompt.

    Each is an array [rows, indexer layers, top_k] or the field of an answer, and has a row for each row of the routing.
    Raises ValueError for another form; positions are checked with the request.
    """
    if value is None:
        return list(forced)
    if layout is None:
        raise ValueError("choices cannot be forced: start the server with enable_return_indexer_topk: true")
    each = value if is_batch else [value] * len(forced)
    if not isinstance(each, list | tuple) or len(each) != len(forced):
        raise ValueError("should be a list with one entry, or null, per prompt")
    return [
        routing if entry is None else _with_choices(entry, routing, layout)
        for entry, routing in zip(each, forced, strict=True)
    ]


def _with_choices(value: object, routing: RoutedExperts | None, layout: IndexLayout) -> RoutedExperts:
    if routing is None:
        raise ValueError("needs forced_routed_experts for the same positions")
    shape = len(routing.rows), len(layout.layer_ids), layout.top_k
    if isinstance(value, np.ndarray):
        rows = value
    else:
        raw = from_base64(value)
        if len(raw) != 4 * int(np.prod(shape)):
            raise ValueError(f"must hold int32 of shape {list(shape)}")
        rows = np.frombuffer(raw, _WIRE_DTYPE).reshape(shape)
    if rows.shape != shape or rows.dtype.kind not in "iu":
        raise ValueError(f"must hold integers of shape {list(shape)}, found {list(rows.shape)}")
    if rows.size and not -1 <= rows.min() <= rows.max() < 2**31 - 1:
        raise ValueError("positions must be at least 0, and -1 behind them")
    return replace(routing, index=packed_index(_ascending(rows.astype(np.int32))))


def _ascending(rows: np.ndarray) -> np.ndarray:
    """Return rows in ascending order with -1 behind; ValueError for a position twice in a row, or for an empty row."""
    none = np.iinfo(np.int32).max
    ordered = np.sort(np.where(rows < 0, none, rows), axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != none)).any():
        raise ValueError("no position may appear twice in a row")
    if (ordered[..., :1] == none).any():
        raise ValueError("every row needs a position")
    return np.where(ordered == none, -1, ordered)


def extract_indexer_topk_from_meta_info(answer: Mapping) -> np.ndarray:
    """Return the index rows of an answer, int32 [rows, indexer layers, top_k].

    Raises: ValueError if the answer has none, misses some, or they do not match their description.
    """
    meta_info = answer.get("meta_info", answer)
    encoded, info = meta_info.get("indexer_topk"), meta_info.get("indexer_topk_info")
    if not isinstance(info, Mapping):
        raise ValueError("meta_info has no indexer_topk: set return_indexer_topk=true in the request")
    if encoded is None:
        raise ValueError(f"indexer_topk misses rows: {info.get('missing')}")
    raw, shape = from_base64(encoded), read_shape(info.get("shape"))
    if shape is None or len(raw) != 4 * int(np.prod(shape)):
        raise ValueError("indexer_topk_info has another shape than the rows")
    if zlib.crc32(raw) != info.get("crc32"):
        raise ValueError("indexer_topk does not match the crc32 in indexer_topk_info: rows were altered")
    return np.frombuffer(raw, _WIRE_DTYPE).reshape(shape).astype(np.int32)
