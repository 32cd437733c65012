"""Parser of safetensors headers: the location of each tensor in a file, a part of a file, or bytes in memory.

The header is untrusted: its length is bounded, and all of its values are checked against the size of the source.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from rayserve_moe.checkpoints.remote import AnyFile
from rayserve_moe.config.given_files import MAX_JSON_BYTES, GivenFileError, parse_json_object

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Tensor types that weights may have, by their name in safetensors headers."""

STORED_DTYPES: dict[str, np.dtype] = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U32": np.dtype(np.uint32),
}
"""DTYPES and the types of quantised parts (see `quantized`) and of positions (see `bucket`)."""

MAX_DIMS = 8
MAX_NAME_LENGTH = 256
_LENGTH_BYTES = 8


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names the file and the tensor."""


class ByteSource(Protocol):
    """Bytes in the safetensors format, of known size."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """Copy `num_bytes` from `offset` on. Raises GivenFileError if the source has fewer."""
        ...


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: bytes `[begin, end)` of `file`, C order."""

    name: str
    file: AnyFile
    dtype: str
    """As the header spells it."""
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: AnyFile, source: ByteSource) -> dict[str, TensorEntry]:
    """Read the header of a source and return its tensors by name. Errors and entries call the source `file`.

    Raises CheckpointError unless the tensors fill the source from the header to its end, without gap or overlap.
    """
    header, start = _parsed(file, source)
    entries = {name: _entry(file, name, fields, start) for name, fields in header.items() if name != "__metadata__"}
    _check_places(file, list(entries.values()), start, source.num_bytes)
    return entries


def read_metadata(file: AnyFile, source: ByteSource) -> dict[str, str]:
    """Read the texts that a header has besides its tensors. Raises CheckpointError if they are not texts."""
    found = _parsed(file, source)[0].get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{file}: __metadata__ must map names to texts")
    return found


def _parsed(file: AnyFile, source: ByteSource) -> tuple[dict[str, Any], int]:
    """Return the header of a source and the offset of its tensors."""
    size = source.num_bytes
    if size < _LENGTH_BYTES:
        raise CheckpointError(f"{file}: truncated: {size} bytes are not a safetensors file")
    header_bytes = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    if _LENGTH_BYTES + header_bytes > size:
        raise CheckpointError(f"{file}: truncated: {size} bytes do not hold its header of {header_bytes} bytes")
    if header_bytes > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: a header of {header_bytes} bytes is longer than {MAX_JSON_BYTES}")
    try:
        header = parse_json_object(source.read(header_bytes, _LENGTH_BYTES))
    except GivenFileError as error:
        raise CheckpointError(f"{file}: not a safetensors file: header {error}") from error
    return header, _LENGTH_BYTES + header_bytes


def is_usable_name(name: Any) -> bool:
    """Return True if a name is a text that can be part of a message."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _entry(file: AnyFile, name: str, fields: Any, start: int) -> TensorEntry:
    """Check a header field; `start` is the offset of the tensor bytes in the file."""
    if not is_usable_name(name):
        raise CheckpointError(f"{file}: a tensor has no usable name: {reprlib.repr(name)}")
    shown = f"{file}: tensor {name}"
    if not isinstance(fields, dict) or not _is_well_formed(fields):
        raise CheckpointError(f"{shown} has a malformed header: {reprlib.repr(fields)}")
    dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if min((begin, end - begin, *shape)) < 0:
        raise CheckpointError(f"{shown} has a negative size in its header: {reprlib.repr(fields)}")
    if dtype in STORED_DTYPES and end - begin != math.prod(shape) * STORED_DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{shown} of shape {reprlib.repr(list(shape))} and dtype {dtype} cannot take "
            f"{reprlib.repr(end - begin)} bytes"
        )
    return TensorEntry(name, file, dtype, shape, start + begin, start + end)


def _is_well_formed(fields: dict[str, Any]) -> bool:
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    return (
        isinstance(dtype, str)
        and dtype.replace("_", "").isalnum()
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and (len(shape) <= MAX_DIMS and len(offsets) == 2)
        and all(type(number) is int for number in (*shape, *offsets))
    )


def _check_places(file: AnyFile, entries: list[TensorEntry], start: int, size: int) -> None:
    """Check that tensors are contiguous up to the end of the file."""
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {entry.name} ends at byte {reprlib.repr(entry.end)}, "
                f"the file at byte {size}"
            )
        if entry.begin != end:
            fault = "overlaps the tensor before it" if entry.begin < end else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {entry.name} begins at byte {entry.begin}, not {end}: it {fault}")
        end = entry.end
    if end != size:
        raise CheckpointError(f"{file}: {size - end} bytes follow the last tensor")
