"""Adapters that trainers write to disk, read whole as the body of a bucket that all hosts receive."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rayserve_moe.checkpoints.adapters.config import CONFIG_FILE, adapter_config_of
from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.checkpoints.header import DTYPES, CheckpointError, read_header
from rayserve_moe.checkpoints.places import check_directory, exists, place_of
from rayserve_moe.checkpoints.remote import opened_anywhere
from rayserve_moe.config.given_files import ANYWHERE, GivenFileError, Reach, json_object_of

TENSORS_FILE = "adapter_model.safetensors"
NO_ADAPTER = b"".join(bytes(part) for part in write_bucket((), adapter_config="null"))
"""Body that restores the configured checkpoint."""


def holds(directory: str, file: str, *, reach: Reach = ANYWHERE) -> bool:
    """Return True if a directory holds a file; False also for a place that cannot be read."""
    try:
        return exists(place_of(directory, reach) / file, reach)
    except (CheckpointError, GivenFileError):
        return False


def adapter_body(directory: str, reach: Reach = ANYWHERE) -> bytearray:
    """Read the config and the tensors of an adapter and return them as the body of a bucket.

    Raises CheckpointError if a file is missing, unreadable or out of reach, or if the config is of another kind.
    """
    place = place_of(directory, reach)
    check_directory(place, reach, holds=CONFIG_FILE)
    try:
        with opened_anywhere(place / CONFIG_FILE, reach) as given:
            fields = json_object_of(given)
        adapter_config_of(fields)
    except GivenFileError as error:
        raise CheckpointError(f"{place / CONFIG_FILE}: {error}") from error
    try:
        with opened_anywhere(place / TENSORS_FILE, reach) as given:
            entries = read_header(Path(TENSORS_FILE), given)
            content = bytearray(given.num_bytes)
            given.read_into(memoryview(content), 0)
    except GivenFileError as error:
        raise CheckpointError(f"{place / TENSORS_FILE}: {error}") from error
    sent = []
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {entry.dtype} (readable: {', '.join(DTYPES)})")
        values = np.frombuffer(memoryview(content)[entry.begin : entry.end], DTYPES[entry.dtype])
        sent.append(SentTensor(name, values.reshape(entry.shape)))
    return bytearray().join(write_bucket(sent, adapter_config=json.dumps(fields)))
