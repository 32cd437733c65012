"""Hugging Face checkpoint directories: the config and lazily read safetensors.

Opening reads only `config.json` and the headers. A read copies only the requested rows out of their file, and checks
that the file is unchanged since it was opened. `names` maps tensors to parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.checkpoints.adapters.additions import MergedTensors
from rayserve_moe.checkpoints.header import (
    DTYPES,
    MAX_NAME_LENGTH,
    STORED_DTYPES,
    CheckpointError,
    TensorEntry,
    is_usable_name,
    read_header,
)
from rayserve_moe.checkpoints.places import check_directory, exists, place_of
from rayserve_moe.checkpoints.quantized import decoded_entries, find_quantized, quantization_of
from rayserve_moe.checkpoints.quantized_forms import QuantizedTensor
from rayserve_moe.checkpoints.remote import (
    NUM_CONNECTIONS,
    AnyDirectory,
    AnyFile,
    AnyStamp,
    RemoteDirectory,
    opened_anywhere,
)
from rayserve_moe.config.given_files import (
    ANYWHERE,
    MAX_BYTES_AT_ONCE,
    GivenFileError,
    Reach,
    ReadableFile,
    json_object_of,
)

CONFIG_FILE = "config.json"
NAMES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}
"""Names of 8-bit dtypes in files."""
QUANTIZATION_FILE = "hf_quant_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened checkpoint directory."""

    directory: AnyDirectory
    config: dict[str, Any]
    """Parsed `config.json`."""
    tensors: dict[str, TensorEntry]
    """By name; quantised tensors appear decoded, as float32."""
    stamps: Mapping[AnyFile, AnyStamp] = field(default_factory=dict)
    """The files' stamps when they were opened."""
    reach: Reach = ANYWHERE
    stored: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Tensors as files hold them."""
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    adapter: MergedTensors | None = None
    """Additions to the tensors that `read` returns; None for none."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors as files hold them."""
        return sum(entry.end - entry.begin for entry in self.stored.values())

    @property
    def is_remote(self) -> bool:
        """Return True if reads are range requests over the network."""
        return isinstance(self.directory, RemoteDirectory)

    def row_dim(self, name: str) -> int:
        """Return a tensor's dimension, counted from its end, whose parts are contiguous in the file."""
        return self.quantized[name].row_dim if name in self.quantized else -2

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy `tensor[index]` out of its file, in the file's dtype, decoded or merged; no other rows are read.

        `index` holds a slice per leading dimension. Raises CheckpointError for an unknown name, a dtype that weights
        cannot have, or a file that was written or replaced since it was opened.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: no tensor {name}")
        if name not in self.quantized and entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype} (readable: {', '.join(DTYPES)})"
            )
        quantized = self.quantized.get(name)
        values = self._read_stored(name, index) if quantized is None else quantized.read(self._read_stored, index)
        if self.adapter is None:
            return values
        parts = (*index, *[slice(None)] * (len(entry.shape) - len(index)))
        bounds = [part.indices(size)[:2] for part, size in zip(parts, entry.shape, strict=True)]
        return self.adapter.merged(name, values, index=bounds)

    def read_scales(
        self, name: str, region: tuple[tuple[int, int], ...], *, dtype: str, block: int
    ) -> np.ndarray | None:
        """Return the scales of a decoded matrix in a region, `[from, to)` of its expert, rows and columns.

        Float32 [rows, blocks of columns]; None unless its file holds `dtype` in squares of `block`.
        """
        found = self.quantized.get(name)
        if found is None or found.block != (block, block) or NAMES[dtype] != self.stored[found.parts[0]].dtype:
            return None
        *leading, (first, last), columns = region
        rows = np.arange(first, last) // block
        index = (*(slice(*bounds) for bounds in leading), slice(int(rows[0]), int(rows[-1]) + 1))
        scales = self._read_stored(found.parts[1], index).astype(np.float32)
        scales = scales.reshape(scales.shape[-2:])
        return scales[rows - rows[0], columns[0] // block : -(-columns[1] // block)]

    def read_integers(self, name: str) -> np.ndarray:
        """Read a whole tensor of integers, which is not a weight. Raises CheckpointError for other dtypes, or like
        `read`.
        """
        entry = self.stored.get(name)
        if entry is None or entry.dtype not in ("I32", "I64"):
            raise CheckpointError(f"{self.directory}: no tensor {name} of integers")
        return self._read_stored(name, ())

    def _read_stored(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        entry = self.stored[name]
        try:
            with opened_anywhere(entry.file, self.reach) as given:
                self._check_stamp(entry.file, given.stamp)
                return _read_slices(given, entry, index)
        except GivenFileError as error:
            raise CheckpointError(f"{entry.file}: cannot read tensor {name}: {error}") from error

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since it was opened, because reads may be inconsistent."""
        try:
            if isinstance(self.directory, RemoteDirectory):
                renewed = self.directory.renewed()
                with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
                    list(pool.map(lambda file: self._check_now(renewed / file.name), self.stamps))
                return
            for file in self.stamps:
                self._check_now(file)
        except GivenFileError as error:
            raise CheckpointError(str(error)) from error

    def _check_now(self, file: AnyFile) -> None:
        try:
            with opened_anywhere(file, self.reach) as given:
                self._check_stamp(file, given.stamp)
        except GivenFileError as error:
            raise GivenFileError(f"{file}: {error}") from error

    def _check_stamp(self, file: AnyFile, stamp: AnyStamp) -> None:
        if stamp != self.stamps[file]:
            raise GivenFileError("the file has changed since it was opened")


def open_checkpoint(directory: str | Path, reach: Reach = ANYWHERE, *, cache: Path | None = None) -> CheckpointFiles:
    """Open a directory that holds `config.json` with `model.safetensors`, alone or as an indexed set.

    `directory` may be a URL or a model of the Hub (see `places`); its reads are cached below the folder `cache`. Raises
    CheckpointError for anything missing, unreadable, truncated, duplicate or out of reach.
    """
    place = place_of(directory, reach, cache=cache)
    config = _config_of(place, reach)
    stamps: dict[AnyFile, AnyStamp] = {}
    if exists(place / INDEX_FILE, reach):
        tensors = _read_indexed(place, stamps, reach)
    elif exists(place / SINGLE_FILE, reach):
        tensors = _read_shard(place / SINGLE_FILE, stamps, reach)
    else:
        raise CheckpointError(f"{place}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        config = _with_quantization(config, tensors, place, reach)
        quantized = find_quantized(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    return CheckpointFiles(place, config, decoded_entries(tensors, quantized), stamps, reach, tensors, quantized)


def read_config(directory: str | Path, reach: Reach = ANYWHERE) -> dict[str, Any]:
    """Parse `config.json` of a checkpoint directory without reading its weights."""
    return _config_of(place_of(directory, reach), reach)


def _config_of(place: AnyDirectory, reach: Reach) -> dict[str, Any]:
    check_directory(place, reach, holds=CONFIG_FILE)
    config = _read_json(place / CONFIG_FILE, reach)
    try:
        quantization_of(config)
    except CheckpointError as error:
        raise CheckpointError(f"{place / CONFIG_FILE}: {error}") from error
    return config


def _with_quantization(
    config: dict[str, Any], tensors: Mapping[str, TensorEntry], place: AnyDirectory, reach: Reach
) -> dict[str, Any]:
    """Return the config with the `quantization` of older files of Model Optimizer, which stands in a file of its own.

    The file is read only if tensors have bytes without a `quantization_config`.
    """
    if quantization_of(config) or not any(entry.dtype in ("U8", "F8_E4M3") for entry in tensors.values()):
        return config
    if not exists(place / QUANTIZATION_FILE, reach):
        return config
    return config | {
        "quantization_config": {**_read_json(place / QUANTIZATION_FILE, reach), "quant_method": "modelopt"}
    }


def _read_json(file: AnyFile, reach: Reach) -> dict[str, Any]:
    try:
        with opened_anywhere(file, reach) as given:
            return json_object_of(given, allows_infinity=file.name == CONFIG_FILE)
    except GivenFileError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _read_shard(file: AnyFile, stamps: dict[AnyFile, AnyStamp], reach: Reach) -> dict[str, TensorEntry]:
    """Read the header of a file, and record the file in `stamps`."""
    try:
        with opened_anywhere(file, reach) as given:
            stamps[file] = given.stamp
            return read_header(file, given)
    except GivenFileError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _read_indexed(directory: AnyDirectory, stamps: dict[AnyFile, AnyStamp], reach: Reach) -> dict[str, TensorEntry]:
    index_file = directory / INDEX_FILE
    weight_map = _read_json(index_file, reach).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        is_usable_name(name) and isinstance(file_name, str) for name, file_name in weight_map.items()
    ):
        raise CheckpointError(f"{index_file}: weight_map must map tensor names to file names")
    tensors: dict[str, TensorEntry] = {}
    names = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(NUM_CONNECTIONS if isinstance(directory, RemoteDirectory) else 1) as pool:
        headers = list(pool.map(lambda name: _read_shard(_shard_path(index_file, name, reach), stamps, reach), names))
    for header in headers:
        for name, entry in header.items():
            if name in tensors:
                raise CheckpointError(f"{entry.file}: tensor {name} is already in {tensors[name].file.name}")
            tensors[name] = entry
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / file_name}: tensor {name} is missing, though {INDEX_FILE} lists it")
        if tensors[name].file.name != file_name:
            raise CheckpointError(
                f"{tensors[name].file}: holds tensor {name}, but {INDEX_FILE} lists it in {file_name}"
            )
    return tensors


def _shard_path(index_file: AnyFile, file_name: str, reach: Reach) -> AnyFile:
    """Resolve a file named by the index; it must be a plain name in the same directory."""
    if Path(file_name).name != file_name or file_name == "..":
        raise CheckpointError(f"{index_file}: {file_name[:MAX_NAME_LENGTH]!r} is not a file name beside the index")
    shard = index_file.parent / file_name
    if not exists(shard, reach):
        raise CheckpointError(f"{shard}: file is missing, though {INDEX_FILE} lists it")
    return shard


def _read_slices(given: ReadableFile, entry: TensorEntry, index: tuple[slice, ...]) -> np.ndarray:
    """Copy the part of a tensor that `index` selects; only contiguous ranges of rows are read."""
    dtype, shape, begin = STORED_DTYPES[entry.dtype], entry.shape or (1,), entry.begin
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    num_single = 0
    # A single row is a tensor with a dimension less: an expert of a tensor of all experts, or a column of one row.
    while num_single < len(shape) - 1 and len(range(shape[num_single])[parts[num_single]]) == 1:
        begin += range(shape[num_single])[parts[num_single]][0] * math.prod(shape[num_single + 1 :]) * dtype.itemsize
        num_single += 1
    values = _read_rows(given, dtype, begin, shape=shape[num_single:], parts=parts[num_single:])
    return values.reshape((1,) * num_single + values.shape) if entry.shape else values.reshape(())


def _read_rows(
    given: ReadableFile, dtype: np.dtype, begin: int, *, shape: tuple[int, ...], parts: list[slice]
) -> np.ndarray:
    """Copy the rows of `parts[0]`, then their columns, a bounded number of rows at a time."""
    num_rows, *row_shape = shape
    start, stop, step = parts[0].indices(num_rows)
    row_bytes = math.prod(row_shape) * dtype.itemsize
    sizes = [len(range(size)[part]) for size, part in zip(row_shape, parts[1:], strict=True)]
    values = np.empty((max(0, stop - start), *sizes), dtype)
    if values.size == 0:
        return values
    if values[0].nbytes == row_bytes:
        given.read_into(_bytes_of(values), begin + start * row_bytes)
        return values[::step]
    rows_at_once = max(1, MAX_BYTES_AT_ONCE // row_bytes)
    block = np.empty((min(rows_at_once, len(values)), *row_shape), dtype)
    for row in range(0, len(values), rows_at_once):
        rows = block[: len(values) - row]
        given.read_into(_bytes_of(rows), begin + (start + row) * row_bytes)
        values[row : row + len(rows)] = rows[:, *parts[1:]]
    return values[::step]


def _bytes_of(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
