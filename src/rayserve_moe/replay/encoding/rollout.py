"""The binary dialect: a container of a whole answer, with its JSON fields as header and the raw rows of all choices.

    u32 header length, little-endian | header, UTF-8 JSON | rows of choice 0 | rows of choice 1 | ...

The header is the JSON answer without `routed_experts`, plus `"rollout": {"rows": [{"shape", "dtype"}, ...],
"compression": null | "zstd"}`. Several native answers are under `"answers"`. Rows have only MoE layers, in the store's
dtype, little-endian, without the rows in `routed_experts_info.missing`. With compression, all that follows the header,
if anything, is a single zstd frame.

Behind the rows are other arrays of the choices, if any, in the order of `"rollout": {"arrays": [[{"name", "shape",
"dtype"}, ...], ...]}`, a list per choice, as float32 or int32. A reader returns each as the field `name` of its choice.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import zstandard

from rayserve_moe.replay.encoding.description import (
    described,
    described_layout,
    described_shape,
    routed_experts_info,
)
from rayserve_moe.replay.encoding.ranges import presence
from rayserve_moe.replay.encoding.wire_rows import WIRE_DTYPES, check_rows, read_shape, stored_rows
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

ROLLOUT_MEDIA_TYPE = "application/x-rollout+octet-stream"
ROLLOUT_ZSTD_MEDIA_TYPE = "application/x-rollout+octet-stream+zstd"
MAX_ROWS_BYTES = 2**30
"""Maximum bytes of rows that a reader accepts from a header."""

ARRAY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("float32", "int32")}
"""Element types of arrays beside the rows."""

_Entry = tuple[tuple[int, ...], np.dtype]
_LENGTH = struct.Struct("<I")
_LEVEL = 3


def _to_json(header: dict) -> bytes:
    """Serialize compactly. Raises ValueError for a float that is not finite."""
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def encode_rollout(
    answer_header: dict,
    rows: Sequence[np.ndarray],
    *,
    arrays: Sequence[Mapping[str, np.ndarray]] = (),
    compress: bool = False,
    to_json: Callable[[dict], bytes] = _to_json,
) -> bytes:
    """Join an answer's JSON fields, the rows [N, MoE layers, k] of its choices, and other arrays of each into a body.

    `to_json` writes the fields, compact and in UTF-8.
    """
    assert "rollout" not in answer_header, "the name rollout is reserved for the container"
    compression = "zstd" if compress else None
    contents: dict = {"rows": [_entry_of(each) for each in rows], "compression": compression}
    if any(arrays):
        contents["arrays"] = [[{"name": name, **_entry_of(each)} for name, each in own.items()] for own in arrays]
    text = to_json({**answer_header, "rollout": contents})
    others = [each for own in arrays for each in own.values()]
    raw = b"".join(np.ascontiguousarray(each, each.dtype.newbyteorder("<")).tobytes() for each in [*rows, *others])
    return b"".join([_LENGTH.pack(len(text)), text, zstandard.compress(raw, _LEVEL) if compress and raw else raw])


def decode_rollout(body: bytes, *, max_rows_bytes: int = MAX_ROWS_BYTES) -> tuple[dict, list[np.ndarray]]:
    """Return the answer's JSON fields and the rows of its choices. Raises ValueError unless it is a whole container."""
    header, begin = _read_header(body)
    contents = header.pop("rollout", None)
    shapes, compression = _read_contents(contents)
    named = _read_arrays(contents)
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in [*shapes, *(entry for _, _, entry in named)]]
    if sum(sizes) > max_rows_bytes:
        raise ValueError(f"the rollout declares more than {max_rows_bytes} bytes of rows")
    raw = memoryview(body)[begin:]
    if compression == "zstd" and sum(sizes):
        raw = memoryview(_decompress(raw, sum(sizes)))
    if len(raw) != sum(sizes):
        raise ValueError("the rollout has another number of bytes of rows than its header declares")
    found, first = [], 0
    for (shape, dtype), size in zip([*shapes, *(entry for _, _, entry in named)], sizes, strict=True):
        found.append(np.frombuffer(raw[first : first + size], dtype).reshape(shape))
        first += size
    _add_arrays(header, named, found[len(shapes) :])
    return header, found[: len(shapes)]


def choices_in(header: Mapping[str, Any]) -> list[Any]:
    """Return the objects of an answer's choices; the answer itself if it is a single native one."""
    return next((header[name] for name in ("choices", "answers") if name in header), [header])


def _add_arrays(header: dict, named: Sequence[tuple[int, str, _Entry]], arrays: Sequence[np.ndarray]) -> None:
    """Add arrays as fields of their choices."""
    choices = choices_in(header)
    for (choice, name, _), array in zip(named, arrays, strict=True):
        if choice >= len(choices) or not isinstance(choices[choice], dict):
            raise ValueError("the header of the rollout declares arrays of a choice that it does not have")
        choices[choice][name] = array


def _entry_of(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def rollout_rows(routing: RoutedExperts, layout: RoutingLayout) -> np.ndarray:
    """Return the rows that a container carries: all that are not missing."""
    check_rows(routing, layout)
    return routing.rows[presence(routing)] if routing.missing else routing.rows


def routing_of_rollout(rows: np.ndarray, description: Mapping, *, layout: RoutingLayout | None = None) -> RoutedExperts:
    """Return the rows of a container at the positions in its header's description."""
    layout = layout or described_layout(description)
    rows = stored_rows(rows, layout)
    if not description.get("missing"):
        return described(rows, description)
    num_rows = described_shape(description)[0]
    if num_rows * max(1, rows[:1].nbytes) > MAX_ROWS_BYTES:
        raise ValueError("routed_experts_info declares too many rows")
    whole = np.zeros((num_rows, *layout.row_shape), layout.dtype)
    routing = described(whole, description)
    present = presence(routing)
    if np.count_nonzero(present) != len(rows):
        raise ValueError("the rollout has another number of rows than routed_experts_info declares present")
    whole[present] = rows
    return routing


def encode(routing: RoutedExperts, layout: RoutingLayout, *, compress: bool = False) -> bytes:
    """Return a container of a single routing and its description."""
    header = {"routed_experts_info": routed_experts_info(routing, layout)}
    return encode_rollout(header, [rollout_rows(routing, layout)], compress=compress)


def decode(value: bytes, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Return the routing of a container that holds a single routing; the container has its start."""
    header, rows = decode_rollout(value)
    description = header.get("routed_experts_info")
    if not isinstance(description, dict) or len(rows) != 1:
        raise ValueError("the rollout does not hold exactly one routing")
    return routing_of_rollout(rows[0], description, layout=layout)


def _read_header(body: bytes) -> tuple[dict, int]:
    """Return the header and the offset of the rows."""
    if len(body) < _LENGTH.size:
        raise ValueError("the rollout is shorter than the length of its header")
    begin = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    if begin > len(body):
        raise ValueError("the rollout is shorter than its declared header")
    try:
        header = json.loads(bytes(body[_LENGTH.size : begin]))
    except (ValueError, RecursionError) as error:
        raise ValueError("the header of the rollout is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError("the header of the rollout is not a JSON object")
    return header, begin


def _read_arrays(contents: Any) -> list[tuple[int, str, _Entry]]:
    """Return the choice, the name, and shape and dtype of every array beside the rows."""
    arrays = contents.get("arrays", [])
    if not isinstance(arrays, list) or not all(isinstance(own, list) for own in arrays):
        raise ValueError("the header of the rollout does not declare its arrays")
    return [(choice, *_read_array_entry(entry)) for choice, own in enumerate(arrays) for entry in own]


def _read_array_entry(entry: object) -> tuple[str, _Entry]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError("the header of the rollout has an array without a name")
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not shape or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise ValueError("the header of the rollout has an array without a shape")
    if dtype not in ARRAY_DTYPES:
        raise ValueError("the header of the rollout has an array of an unknown dtype")
    return entry["name"], (tuple(shape), ARRAY_DTYPES[dtype])


def _read_contents(contents: object) -> tuple[list[tuple[tuple[int, int, int], np.dtype]], str | None]:
    """Return shape and dtype of every choice's rows, and the compression."""
    if not isinstance(contents, dict) or not isinstance(contents.get("rows"), list):
        raise ValueError("the header of the rollout does not declare its rows")
    compression = contents.get("compression")
    if compression not in (None, "zstd"):
        raise ValueError("the rollout is compressed in an unknown way")
    return [_read_rows_entry(each) for each in contents["rows"]], compression


def _read_rows_entry(entry: object) -> tuple[tuple[int, int, int], np.dtype]:
    shape, name = (read_shape(entry.get("shape")), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
    if shape is None:
        raise ValueError("the header of the rollout has no shape of three sizes")
    if name not in ("uint8", "uint16"):
        raise ValueError("the header of the rollout has no valid dtype of routing rows")
    return shape, WIRE_DTYPES[name]


def _decompress(frame: memoryview, num_bytes: int) -> bytes:
    """Decompress a frame that declares `num_bytes`, so that no more is ever allocated."""
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise ValueError("the rollout has another number of bytes of rows than its header declares")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError("the rows of the rollout are not one frame of zstd") from error
