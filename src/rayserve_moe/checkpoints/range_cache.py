"""Disk cache of ranges read from a remote checkpoint, so that another process of the host can resume a load.

Each remote file has a sparse content file and a journal. A range is appended to the journal, with its checksum, after
it was written to the content file. Ranges torn by a crash or a full disk do not match their checksum and are read anew.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import logging
import os
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

FREE_SHARE = 0.1
"""Share of the disk that is left free."""
_FIELDS = 3


@dataclass
class _Kept:
    """The cached ranges of a file."""

    content: Path
    journal: Path
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    """End and checksum by start."""
    starts: list[int] = field(default_factory=list)
    """Sorted."""

    def add(self, start: int, *, end: int, checksum: int) -> None:
        """Add a range; of two with the same start the longer is kept."""
        if start not in self.ranges:
            bisect.insort(self.starts, start)
        if end >= self.ranges.get(start, (0, 0))[0]:
            self.ranges[start] = (end, checksum)

    def around(self, start: int, end: int) -> tuple[int, int, int] | None:
        """Return start, end and checksum of a kept range that holds `[start, end)`, or None."""
        place = bisect.bisect_right(self.starts, start) - 1
        if place < 0 or self.ranges[self.starts[place]][0] < end:
            return None
        return self.starts[place], *self.ranges[self.starts[place]]


class RangeCache:
    """Ranges of the files of a remote checkpoint, in a `folder` that only this user may enter.

    Threads and processes of a host may share it. A full disk ends the caching, with a warning and no other effect.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _Kept] = {}
        self._changing = threading.Lock()
        self._is_full = False

    def read(self, name: str, version: str, *, span: tuple[int, int]) -> bytes | None:
        """Return bytes `[from, to)` of a version of a file; None if they are not cached or damaged."""
        try:
            kept = self._of(name, version)
            with self._changing:
                found = kept.around(*span)
            if found is None:
                return None
            start, end, checksum = found
            with kept.content.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), end - start, start)
        except OSError:
            return None
        if zlib.crc32(content) != checksum:
            return None
        return content if (start, end) == span else content[span[0] - start : span[1] - start]

    def write(self, name: str, version: str, *, start: int, content: bytes) -> None:
        """Cache a range of a version of a file."""
        if self._is_full:
            return
        try:
            kept = self._of(name, version)
            disk = os.statvfs(self.folder)
            if disk.f_bavail * disk.f_frsize < FREE_SHARE * disk.f_blocks * disk.f_frsize + len(content):
                self._end(f"less than {FREE_SHARE:.0%} of its disk is free")
                return
            end, checksum = start + len(content), zlib.crc32(content)
            _write(kept.content, content, offset=start)
            # Newlines at both ends separate the record from a torn neighbour.
            _write(kept.journal, f"\n{start} {end} {checksum}\n".encode())
            with self._changing:
                kept.add(start, end=end, checksum=checksum)
        except OSError as error:
            self._end(error.strerror or type(error).__name__)

    def _of(self, name: str, version: str) -> _Kept:
        """Return the file's ranges, read from its journal at the first call; delete the ranges of other versions."""
        with self._changing:
            if name not in self._files:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                tag = hashlib.sha256(version.encode()).hexdigest()[:16]
                for other in self.folder.glob(f"{glob.escape(name)}.*"):
                    if not other.name.startswith(f"{name}.{tag}."):
                        other.unlink(missing_ok=True)
                self._files[name] = _read_journal(self.folder / f"{name}.{tag}.content")
            return self._files[name]

    def _end(self, reason: str) -> None:
        if not self._is_full:
            log.warning("caching of a remote checkpoint in %s has ended: %s", self.folder, reason)
        self._is_full = True


def cache_for(url: str, folder: Path) -> RangeCache:
    """Return the cache of a checkpoint behind a URL, in its own folder below `folder`."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in url)[-60:]
    return RangeCache(folder / f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")


def _read_journal(content: Path) -> _Kept:
    kept = _Kept(content, content.with_suffix(".ranges"))
    lines = kept.journal.read_text("ascii", errors="replace").splitlines() if kept.journal.exists() else []
    for fields in (line.split() for line in lines):
        if len(fields) == _FIELDS and all(each.isdecimal() for each in fields):
            kept.add(int(fields[0]), end=int(fields[1]), checksum=int(fields[2]))
    return kept


def _write(path: Path, content: bytes, offset: int | None = None) -> None:
    """Write at an offset, or append."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if offset is None else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        done = 0
        while done < len(content):
            rest = memoryview(content)[done:]
            done += os.write(descriptor, rest) if offset is None else os.pwrite(descriptor, rest, offset + done)
    finally:
        os.close(descriptor)
