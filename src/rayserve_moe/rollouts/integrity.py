"""Checksums of shards: the CRC-32 of a shard's bytes stands in its name, so that a damaged one is found and named."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHECKSUM = re.compile(r"-crc32-([0-9a-f]{8})\.parquet$")
_BLOCK_BYTES = 1 << 20


def checked_name(stem: str, file: Path) -> str:
    """Name for a shard with the bytes of `file`."""
    return f"{stem}-crc32-{crc32_of(file):08x}.parquet"


def crc32_of(file: Path) -> int:
    """CRC-32 of the whole file."""
    crc32 = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def is_intact(file: Path) -> bool:
    """Whether the bytes match the checksum in the name; true for a name without one. OSError where it is unreadable."""
    named = _CHECKSUM.search(file.name)
    return named is None or crc32_of(file) == int(named[1], 16)


def altered(files: Iterable[Path]) -> list[Path]:
    """Shards whose bytes do not match their names, or cannot be read at all; on several threads, in order."""
    files = list(files)
    with ThreadPoolExecutor() as threads:
        return [file for file, intact in zip(files, threads.map(_is_readable, files), strict=True) if not intact]


def _is_readable(file: Path) -> bool:
    try:
        return is_intact(file)
    except OSError:
        return False
