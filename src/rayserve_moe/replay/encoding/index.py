"""Index rows of sparse attention in answers and requests, in two forms, and their description.

    sglang    base64 of little-endian int32 [rows, layers with sparse attention, top_k], -1 behind
    packed    {"data": base64 of the packed rows, "lengths": [bytes of each row, 0 for a missing row]}

Layers that share an index repeat its row in the form of SGLang. Packed rows (`replay.index_rows`) are those of the
indexes, about a byte per position. Rows of an index of blocks hold numbers of blocks, a row for each layer and head of
the index.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe.replay.encoding.ranges import missing_ranges
from rayserve_moe.replay.encoding.wire_rows import WIRE_DTYPES, from_base64, read_shape, to_base64
from rayserve_moe.replay.index_rows import check_packed, packed_index, unpacked_rows
from rayserve_moe.requests.records import INDEX, IndexLayout, RoutedExperts
from rayserve_moe.requests.row_parts import are_known, known_part

NAME, SGLANG, PACKED = "indexer_topk", "sglang", "packed"
_WIRE_DTYPE = WIRE_DTYPES["int32"]
MAX_WIRE_BYTES = 1 << 30
"""Maximum bytes of a choice's rows in SGLang's form; 2,148 tokens of DeepSeek-V3.2."""


def index_rows_of(routing: RoutedExperts, layout: IndexLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return index rows, int32 [N, indexer layers, top_k], and the mask of known rows, bool [N]; others are -1."""
    packed = known_index(routing)
    known = are_known(packed)
    return unpacked_rows(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k), known


def known_index(routing: RoutedExperts) -> np.ndarray:
    """Return packed index rows, object [N]; None for a row that is missing or was not captured."""
    packed = known_part(routing, INDEX)
    return np.full(len(routing.rows), None, object) if packed is None else packed


def over_sparse_layers(rows_NIK: np.ndarray, layout: IndexLayout) -> np.ndarray:
    """Return index rows [N, layers, K] of all layers with sparse attention; layers that share an index repeat rows."""
    if layout.layer_ids == layout.sparse_layer_ids:
        return rows_NIK
    return rows_NIK[:, sources_of(layout)]


def sources_of(layout: IndexLayout) -> np.ndarray:
    """Return for each layer with sparse attention the number of the index that it sees by, int [layers]."""
    return np.searchsorted(layout.layer_ids, layout.sparse_layer_ids, side="right") - 1


def encode(routing: RoutedExperts, layout: IndexLayout, *, form: str = SGLANG) -> tuple[str | dict | None, dict]:
    """Return index rows and their description.

    With a missing row, those in SGLang's form are None, and packed rows are those that are known. Rows in SGLang's form
    are also None, with the reason in `refused`, if they have more than `MAX_WIRE_BYTES`.
    """
    packed = known_index(routing)
    known = are_known(packed)
    layers, raw = layout.layer_ids if form == PACKED else layout.sparse_layer_ids, b""
    num_bytes = 4 * len(packed) * len(layers) * layout.top_k
    is_refused = form != PACKED and num_bytes > MAX_WIRE_BYTES
    if form == PACKED:
        raw = b"".join(filter(None, packed))
    elif known.all() and not is_refused:
        rows = unpacked_rows(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k)
        raw = over_sparse_layers(rows, layout).astype(_WIRE_DTYPE, copy=False).tobytes()
    value: str | dict | None = to_base64(np.frombuffer(raw, np.uint8))
    if form == PACKED:
        value = {"data": value, "lengths": [0 if row is None else len(row) for row in packed]}
    refused = f"{num_bytes / 2**30:.1f} GiB of rows: request them packed, or from a later position"
    return value if form == PACKED or (known.all() and not is_refused) else None, {
        "shape": [len(packed), len(layers), layout.top_k],
        "dtype": PACKED if form == PACKED else "int32",
        "start": routing.start,
        "layer_ids": list(layout.sparse_layer_ids),
        "indexer_layer_ids": list(layout.layer_ids),
        "block_size": layout.block_size,
        "crc32": zlib.crc32(raw) if known.all() and not is_refused else None,
        "missing": [list(entry) for entry in missing_ranges(known, routing.start)],
        "weight_version": [list(entry) for entry in routing.weight_version],
        **({"refused": refused} if is_refused else {}),
    }


def decode(value: object, info: Mapping[str, Any]) -> tuple[np.ndarray, IndexLayout]:
    """Return packed index rows, object [N] with None for missing rows, and their layout.

    Raises: ValueError if they do not match their description, or all are null because some are missing.
    """
    layout, shape = _described_layout(info), read_shape(info.get("shape"))
    if value is None and info.get("refused") is not None:
        raise ValueError(f"indexer_topk is null: {info['refused']}")
    if value is None:
        raise ValueError(f"indexer_topk misses rows: {info.get('missing')}")
    of_form = layout.layer_ids if isinstance(value, Mapping) else layout.sparse_layer_ids
    if shape is None or shape[1:] != (len(of_form), layout.top_k):
        raise ValueError("indexer_topk_info has another shape than the rows")
    raw, packed = _read_packed(value, layout) if isinstance(value, Mapping) else _read_int32(value, layout, shape[0])
    if len(packed) != shape[0]:
        raise ValueError("indexer_topk_info has another shape than the rows")
    if info.get("crc32") is not None and zlib.crc32(raw) != info["crc32"]:
        raise ValueError("indexer_topk does not match the crc32 in indexer_topk_info: rows were altered")
    return packed, layout


def _described_layout(info: Mapping[str, Any]) -> IndexLayout:
    shape = read_shape(info.get("shape"))
    sparse, own = (_layers_in(info, name) for name in ("layer_ids", "indexer_layer_ids"))
    if shape is None or not set(own) <= set(sparse) or own[0] != sparse[0]:
        raise ValueError("indexer_topk_info has no shape, or layers that no model has")
    block_size = info.get("block_size", 1)
    if type(block_size) is not int or block_size < 1:
        raise ValueError("indexer_topk_info has a block_size that is no size")
    return IndexLayout(own, sparse, shape[2], block_size=block_size)


def _layers_in(info: Mapping[str, Any], name: str) -> tuple[int, ...]:
    layers = info.get(name)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"indexer_topk_info has no {name}")
    if not layers or sorted(layers) != layers:
        raise ValueError(f"indexer_topk_info has {name} that do not ascend")
    return tuple(layers)


def _read_packed(value: Mapping, layout: IndexLayout) -> tuple[bytes, np.ndarray]:
    """Return the bytes of packed rows, and each of them; None for a row of length 0."""
    raw, lengths = from_base64(value.get("data"), NAME), value.get("lengths")
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(raw):
        raise ValueError("indexer_topk must have lengths that add up to its data")
    packed, first = np.full(len(lengths), None, object), 0
    for place, length in enumerate(lengths):
        if length:
            packed[place] = raw[first : first + length]
            check_packed(packed[place], num_layers=len(layout.layer_ids), top_k=layout.top_k)
        first += length
    return raw, packed


def _read_int32(value: object, layout: IndexLayout, num_rows: int) -> tuple[bytes, np.ndarray]:
    """Return the bytes of rows in SGLang's form, and the rows packed."""
    raw, shape = from_base64(value, NAME), (num_rows, len(layout.sparse_layer_ids), layout.top_k)
    if len(raw) != 4 * int(np.prod(shape)):
        raise ValueError("indexer_topk_info has another shape than the rows")
    return raw, packed_index(_of_indexes(np.frombuffer(raw, _WIRE_DTYPE).reshape(shape), layout))


def _of_indexes(rows: np.ndarray, layout: IndexLayout) -> np.ndarray:
    """Return the rows of layers with an index, from those of all layers with sparse attention or of those alone."""
    if rows.shape[1] == len(layout.layer_ids):
        own = rows
    else:
        own = rows[:, np.searchsorted(layout.sparse_layer_ids, layout.layer_ids)]
        if not np.array_equal(own[:, sources_of(layout)], rows):
            raise ValueError("layers that share an index must have the same rows")
    if own.size and not -1 <= own.min() <= own.max() < 2**31 - 1:
        raise ValueError("positions must be at least 0, and -1 behind them")
    return _ascending(own.astype(np.int32))


def decode_each_forced_index(
    value: object, forced: Sequence[RoutedExperts | None], *, layout: IndexLayout | None, is_batch: bool
) -> list[RoutedExperts | None]:
    """Add the choices of `forced_indexer_topk` to the forced routing of every prompt.

    Each is an array [rows, layers, top_k] of the layers with an index or of all with sparse attention, or the field of
    an answer in any form, and has a row for each row of the routing.
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
    num_rows = len(routing.rows)
    if isinstance(value, Mapping):
        _, packed = _read_packed(value, layout)
        if len(packed) != num_rows or any(row is None for row in packed):
            raise ValueError(f"must hold {num_rows} rows, and none may be missing")
        return replace(routing, parts={**routing.parts, INDEX: packed})
    rows = value
    if not isinstance(rows, np.ndarray):
        raw, layer_bytes = from_base64(value, NAME), 4 * num_rows * layout.top_k
        num_layers = len(raw) // layer_bytes if layer_bytes else len(layout.layer_ids)
        if len(raw) != num_layers * layer_bytes:
            raise ValueError(f"must hold int32 of shape {_shape_of(num_rows, layout)}")
        rows = np.frombuffer(raw, _WIRE_DTYPE).reshape(num_rows, num_layers, layout.top_k)
    shapes = [(num_rows, len(layers), layout.top_k) for layers in (layout.layer_ids, layout.sparse_layer_ids)]
    if rows.shape not in shapes or rows.dtype.kind not in "iu":
        raise ValueError(f"must hold integers of shape {_shape_of(num_rows, layout)}, found {list(rows.shape)}")
    return replace(routing, parts={**routing.parts, INDEX: packed_index(_of_indexes(rows, layout))})


def _shape_of(num_rows: int, layout: IndexLayout) -> list[int]:
    return [num_rows, len(layout.sparse_layer_ids), layout.top_k]


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
    """Return the index rows of an answer, int32 [rows, layers with sparse attention, top_k].

    `answer` is an object of a `/generate` answer, a choice of another route, or a result of `Engine.generate`.

    Raises: ValueError if the answer has none, misses some, or they do not match their description.
    """
    meta_info = answer.get("meta_info", answer)
    info = meta_info.get("indexer_topk_info")
    if not isinstance(info, Mapping):
        raise ValueError("meta_info has no indexer_topk: set return_indexer_topk=true in the request")
    packed, layout = decode(meta_info.get("indexer_topk"), info)
    if any(row is None for row in packed):
        raise ValueError(f"indexer_topk misses rows: {info.get('missing')}")
    rows = unpacked_rows(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k)
    return over_sparse_layers(rows, layout)
