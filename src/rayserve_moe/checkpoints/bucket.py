"""Buckets of sent weights: safetensors in memory, with a checksum per tensor, whole or as changed positions.

The metadata `crc32` is JSON `{name: integer}` over the bytes of every tensor. A delta also has `base_version` there,
and for a checkpoint tensor NAME the arrays `NAME.positions` (uint32, flat, C order) and `NAME.values` of equal length.
The metadata `adapter_config` makes the tensors those of a LoRA adapter; JSON null there stands for no adapter.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.checkpoints.adapters.config import AdapterConfig, adapter_config_of
from rayserve_moe.checkpoints.casting import is_finite
from rayserve_moe.checkpoints.header import DTYPES, STORED_DTYPES, CheckpointError, TensorEntry, read_header
from rayserve_moe.checkpoints.header import read_metadata as metadata_of
from rayserve_moe.checkpoints.pieces import Region
from rayserve_moe.config.given_files import GivenFileError, parse_json_object

POSITIONS, VALUES = ".positions", ".values"
ADAPTER_CONFIG = "adapter_config"
BUCKET = Path("the bucket")
"""Name of the source in error messages."""
_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True)
class SentTensor:
    """A tensor of the checkpoint as it was sent."""

    name: str
    values: np.ndarray
    """In the shape of files; for a delta the values at `positions`."""
    positions: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape in files; None for a delta, which does not carry it."""
        return self.values.shape if self.positions is None else None


@dataclass(frozen=True)
class SentPiece:
    """A part of a sent tensor."""

    name: str
    region: Region
    """`[from, to)` of each dimension in files."""
    values: np.ndarray
    """In the region's shape; for a delta the values at `positions`."""
    positions: np.ndarray | None = None
    """Flat within the region, C order."""
    dtype: str = ""
    """If set, `values` are bits of this dtype."""

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def as_bits(self) -> SentPiece:
        """Return it with values as unsigned integers: pickle copies bfloat16 in band, and again at each get."""
        bits = np.ascontiguousarray(self.values).view(f"u{self.values.itemsize}")
        return replace(self, values=bits, dtype=self.values.dtype.name)

    def as_typed(self) -> SentPiece:
        """Return it with values in their dtype."""
        return replace(self, values=self.values.view(np.dtype(self.dtype)), dtype="")


@dataclass(frozen=True)
class SentBucket:
    """The tensors of a bucket."""

    tensors: tuple[SentTensor, ...]
    base_version: str | None = None
    """For a delta, the version of the weights that it changes."""


@dataclass(frozen=True)
class SentAdapter:
    """A LoRA adapter, which every host reads whole and merges into its share of the configured checkpoint."""

    body: np.ndarray
    """The bucket's bytes, uint8."""
    base_version: str | None = None
    restores_base: bool = False
    """True for no adapter: the configured checkpoint as it is."""


@dataclass(frozen=True)
class SentShares:
    """A bucket that the sender has cut into the hosts' shares."""

    by_host: tuple[Any, ...]
    """By host, a reference to its pieces."""
    num_bytes: tuple[int, ...]
    """By host."""
    base_version: str | None = None


Heads = Sequence[tuple[str, tuple[int, ...] | None]]
"""Names of tensors with their shapes, None for a delta."""


@dataclass(frozen=True)
class WantedTensor:
    """A host's share of a sent tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in files."""
    regions: tuple[Region, ...]
    """Regions in the host's share."""


class _Memory:
    """Bytes in memory as a `header.ByteSource`."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    @property
    def num_bytes(self) -> int:
        return len(self._body)

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        return bytes(self._body[offset : offset + num_bytes])


def read_bucket(body: bytes | bytearray) -> SentBucket | SentAdapter:
    """Read a bucket and check it; its tensors are views of `body`.

    Raises CheckpointError if it is truncated or malformed, a checksum is missing or wrong, a value is not finite, a
    position is repeated, or a tensor is sent both whole and as a delta.
    """
    view = memoryview(body)
    entries, metadata = read_header(BUCKET, _Memory(view)), metadata_of(BUCKET, _Memory(view))
    _check_sums(entries, metadata, view)
    arrays = {name: _array(entry, view) for name, entry in entries.items()}
    base_version = metadata.get("base_version")
    tensors = _whole(arrays) if base_version is None else _deltas(arrays)
    for tensor in tensors:
        if not is_finite(tensor.values):
            raise CheckpointError(f"tensor {tensor.name} holds values that are not finite")
    if ADAPTER_CONFIG in metadata:
        restores_base = adapter_config_in(metadata) is None
        return SentAdapter(np.frombuffer(view, np.uint8), base_version, restores_base)
    return SentBucket(tensors, base_version)


def adapter_in(body: np.ndarray) -> tuple[AdapterConfig | None, dict[str, np.ndarray]]:
    """Return the config, None for no adapter, and the tensors of a SentAdapter's bytes, which `read_bucket` checked."""
    view = np.ascontiguousarray(body).data
    entries, metadata = read_header(BUCKET, _Memory(view)), metadata_of(BUCKET, _Memory(view))
    return adapter_config_in(metadata), {name: _array(entry, view) for name, entry in entries.items()}


def adapter_config_in(metadata: Mapping[str, str]) -> AdapterConfig | None:
    """Return the adapter's config in a bucket's metadata; None for JSON null. Raises CheckpointError for others."""
    raw = metadata[ADAPTER_CONFIG]
    if raw == "null":
        return None
    try:
        return adapter_config_of(parse_json_object(raw.encode()))
    except GivenFileError as error:
        raise CheckpointError(f"{ADAPTER_CONFIG} in __metadata__ must be a JSON object: {error}") from error


def write_bucket(
    tensors: Sequence[SentTensor], *, base_version: str | None = None, adapter_config: str | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a bucket part by part; contiguous tensors are not copied."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        if tensor.positions is None:
            arrays[tensor.name] = tensor.values
        else:
            arrays |= {tensor.name + POSITIONS: tensor.positions, tensor.name + VALUES: tensor.values}
    raw = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for name, array in arrays.items()}
    header: dict[str, object] = {"__metadata__": {"crc32": json.dumps({name: zlib.crc32(raw[name]) for name in raw})}}
    texts = {"base_version": base_version, ADAPTER_CONFIG: adapter_config}
    header["__metadata__"] |= {key: text for key, text in texts.items() if text is not None}  # type: ignore[operator]
    begin = 0
    for name, array in arrays.items():
        end = begin + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield len(encoded).to_bytes(8, "little") + encoded
    yield from raw.values()


def pieces_for(tensors: Sequence[SentTensor], wanted: Sequence[WantedTensor]) -> list[SentPiece]:
    """Return the pieces that a host needs, as bits. Raises CheckpointError like `cut`."""
    return [piece.as_bits() for tensor, share in zip(tensors, wanted, strict=True) for piece in cut(tensor, share)]


def cut(tensor: SentTensor, wanted: WantedTensor) -> list[SentPiece]:
    """Return a tensor's pieces that a host needs. Raises CheckpointError for positions outside of the tensor."""
    if tensor.positions is None:
        return [SentPiece(tensor.name, region, tensor.values[_slices(region)]) for region in wanted.regions]
    if tensor.positions.size and int(tensor.positions.max()) >= math.prod(wanted.shape):
        raise CheckpointError(f"{tensor.name}{POSITIONS} has positions outside of shape {list(wanted.shape)}")
    return [_cut_delta(tensor, tensor.positions, wanted.shape, region) for region in wanted.regions]


def _cut_delta(tensor: SentTensor, positions: np.ndarray, shape: tuple[int, ...], region: Region) -> SentPiece:
    if all(bounds == (0, size) for bounds, size in zip(region, shape, strict=True)):
        return SentPiece(tensor.name, region, tensor.values, positions)
    places = np.unravel_index(positions, shape)
    is_within = np.ones(len(positions), bool)
    for place, (start, stop) in zip(places, region, strict=True):
        is_within &= (place >= start) & (place < stop)
    local = tuple(place[is_within] - start for place, (start, _) in zip(places, region, strict=True))
    flat = np.ravel_multi_index(local, tuple(stop - start for start, stop in region))
    return SentPiece(tensor.name, region, tensor.values[is_within], flat)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in region)


def _check_sums(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], view: memoryview) -> None:
    try:
        sums = parse_json_object(metadata.get("crc32", "{}").encode())
    except GivenFileError as error:
        raise CheckpointError(f"crc32 in __metadata__ must be JSON {{name: integer}}: {error}") from error
    for name, entry in entries.items():
        if name not in sums:
            raise CheckpointError(f"tensor {name} has no crc32 in __metadata__")
        if sums[name] != zlib.crc32(view[entry.begin : entry.end]):
            raise CheckpointError(f"tensor {name} does not match the crc32 in __metadata__")


def _array(entry: TensorEntry, view: memoryview) -> np.ndarray:
    if entry.dtype not in STORED_DTYPES:
        raise CheckpointError(f"tensor {entry.name} has dtype {entry.dtype} (readable: {', '.join(DTYPES)})")
    dtype = STORED_DTYPES[entry.dtype]
    return np.frombuffer(view[entry.begin : entry.end], dtype).reshape(entry.shape)


def _whole(arrays: Mapping[str, np.ndarray]) -> tuple[SentTensor, ...]:
    for name, array in arrays.items():
        _check_floating(name, array)
    return tuple(SentTensor(name, array) for name, array in arrays.items())


def _deltas(arrays: Mapping[str, np.ndarray]) -> tuple[SentTensor, ...]:
    """Return the tensors of a delta, in which some may be whole."""
    tensors = []
    for name, array in arrays.items():
        stem = name.removesuffix(POSITIONS)
        if stem != name:
            values = arrays.get(stem + VALUES)
            if values is None or array.dtype != np.uint32 or array.ndim != 1 or values.shape != array.shape:
                raise CheckpointError(f"{name} must be uint32 [n], with {stem}{VALUES} of equal length")
            _check_floating(stem + VALUES, values)
            if stem in arrays:
                raise CheckpointError(f"tensor {stem} is in the bucket both whole and as a delta")
            if _repeats(array):
                raise CheckpointError(f"{name} has a repeated position")
            tensors.append(SentTensor(stem, values, array))
        elif name.removesuffix(VALUES) + POSITIONS not in arrays:
            _check_floating(name, array)
            tensors.append(SentTensor(name, array))
    return tuple(tensors)


def _repeats(positions: np.ndarray) -> bool:
    """Return True if a position is repeated. Ascending positions need no sort."""
    is_ascending = bool((positions[1:] > positions[:-1]).all())
    return not is_ascending and len(np.unique(positions)) < len(positions)


def _check_floating(name: str, array: np.ndarray) -> None:
    if array.dtype not in DTYPES.values():
        raise CheckpointError(f"tensor {name} has dtype {_NAMES[array.dtype]}, expected one of {', '.join(DTYPES)}")
