"""Open a Hugging Face checkpoint directory: its config, and its safetensors, lazily.

Opening reads `config.json` and the headers only. A read maps the file and copies just the slice asked for. What the
tensors mean is the business of `names`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Tensor types that weights may have, by their name in safetensors headers."""

_LENGTH_BYTES = 8


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names the file and the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `[begin, end)` of `file`, C order, `dtype` as the header spells it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened directory: the parsed `config.json` and every tensor by name."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(entry.end - entry.begin for entry in self.tensors.values())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy `tensor[index]` out of its file, in the file's dtype; nothing else of the file is read.

        `index` holds one slice per leading dimension. CheckpointError for an unknown name, a dtype that weights
        cannot have, or a file that shrank since it was opened.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: no tensor {name}")
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype} (readable: {', '.join(DTYPES)})"
            )
        if entry.begin == entry.end:
            return np.zeros(entry.shape, DTYPES[entry.dtype])[index]
        try:
            mapped = np.memmap(entry.file, DTYPES[entry.dtype], "r", offset=entry.begin, shape=entry.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{entry.file}: cannot read tensor {name}: {error}") from error
        return np.array(mapped[index])


def open_checkpoint(directory: str | Path) -> CheckpointFiles:
    """Open a directory that holds `config.json` with `model.safetensors`, alone or as an indexed set.

    CheckpointError for anything missing, unreadable, truncated or stated twice.
    """
    path = Path(directory)
    config = read_config(path)
    tensors: dict[str, TensorEntry] = {}
    if (path / INDEX_FILE).exists():
        tensors = _read_indexed(path)
    elif (path / SINGLE_FILE).exists():
        tensors = _read_header(path / SINGLE_FILE)
    else:
        raise CheckpointError(f"{path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return CheckpointFiles(path, config, tensors)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Parse `config.json` of a checkpoint directory without looking at its weights."""
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory")
    return _read_json_object(path / CONFIG_FILE)


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(parsed).__name__}, not an object")
    return parsed


def _read_indexed(directory: Path) -> dict[str, TensorEntry]:
    index_file = directory / INDEX_FILE
    weight_map = _read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_file}: weight_map must map tensor names to file names")
    tensors: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, entry in _read_header(_shard_path(index_file, file_name)).items():
            if name in tensors:
                raise CheckpointError(f"{entry.file}: tensor {name} is already in {tensors[name].file.name}")
            tensors[name] = entry
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / file_name}: tensor {name} is missing, though {INDEX_FILE} lists it")
        if tensors[name].file.name != file_name:
            raise CheckpointError(
                f"{tensors[name].file}: holds tensor {name}, which {INDEX_FILE} puts into {file_name}"
            )
    return tensors


def _shard_path(index_file: Path, file_name: str) -> Path:
    """Resolve a file named by the index; it must be a plain name beside it."""
    if Path(file_name).name != file_name:
        raise CheckpointError(f"{index_file}: {file_name!r} is not the name of a file beside the index")
    shard = index_file.parent / file_name
    if not shard.exists():
        raise CheckpointError(f"{shard}: file is missing, though {INDEX_FILE} lists it")
    return shard


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if _LENGTH_BYTES + header_bytes > size:
                raise CheckpointError(f"{file}: truncated: {size} bytes do not hold its header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a JSON object")
    start = _LENGTH_BYTES + header_bytes
    entries = {name: _entry(file, name, fields, start) for name, fields in header.items() if name != "__metadata__"}
    for entry in entries.values():
        if entry.end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {entry.name} ends at byte {entry.end}, the file at byte {size}"
            )
    return entries


def _entry(file: Path, name: str, fields: Any, start: int) -> TensorEntry:
    """Check one header field; `start` is where the tensor bytes of the file begin."""
    try:
        dtype, (begin, end) = str(fields["dtype"]), fields["data_offsets"]
        shape = tuple(int(size) for size in fields["shape"])
        begin, end = int(begin), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name} has a malformed header: {fields!r}") from error
    if min((begin, end - begin, *shape)) < 0:
        raise CheckpointError(f"{file}: tensor {name} has a negative size in its header: {fields!r}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)} and dtype {dtype} cannot take {end - begin} bytes"
        )
    return TensorEntry(name, file, dtype, shape, start + begin, start + end)
