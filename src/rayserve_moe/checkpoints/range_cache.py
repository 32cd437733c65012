"""What was read of a remote checkpoint, kept on a disk of this host, so that another process goes on where one ended.

Each remote file has a sparse file beside a journal, to which every range is appended once it lies in the file, with its
checksum. What a crash tore, or a full disk cut off, does not have its checksum, and is read anew.
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
"""Of the disk that is left free."""
_FIELDS = 3


@dataclass
class _Kept:
    """The ranges of one file: `[start, end)` and checksum, by start; `starts` in order."""

    content: Path
    journal: Path
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    def add(self, start: int, *, end: int, checksum: int) -> None:
        """Note a range; of two that begin alike the longer one counts."""
        if start not in self.ranges:
            bisect.insort(self.starts, start)
        if end >= self.ranges.get(start, (0, 0))[0]:
            self.ranges[start] = (end, checksum)

    def around(self, start: int, end: int) -> tuple[int, int, int] | None:
        """A kept range that holds `[start, end)`, with its checksum."""
        place = bisect.bisect_right(self.starts, start) - 1
        if place < 0 or self.ranges[self.starts[place]][0] < end:
            return None
        return self.starts[place], *self.ranges[self.starts[place]]


class RangeCache:
    """Ranges of the files of one remote checkpoint in a `folder` that only this user may enter. Threads may share it.

    Processes of a host may share a folder too. A disk that fills up ends the keeping, with a warning, and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _Kept] = {}
        self._changing = threading.Lock()
        self._is_full = False

    def read(self, name: str, version: str, *, span: tuple[int, int]) -> bytes | None:
        """Bytes `[from, to)` of a version of a file; None where they are not kept, or not as they were written."""
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
        """Keep a range of a version of a file."""
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
            # Newlines at both ends: of a torn record no other is a part.
            _write(kept.journal, f"\n{start} {end} {checksum}\n".encode())
            with self._changing:
                kept.add(start, end=end, checksum=checksum)
        except OSError as error:
            self._end(error.strerror or type(error).__name__)

    def _of(self, name: str, version: str) -> _Kept:
        """The file's ranges, read from its journal at the first call; what is kept of other versions is deleted."""
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
            log.warning("no more is kept of a remote checkpoint in %s: %s", self.folder, reason)
        self._is_full = True


def cache_for(url: str, folder: Path) -> RangeCache:
    """The cache of a checkpoint behind a URL, in a folder of its own below `folder`."""
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
    """Write at a place, or append at once."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if offset is None else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        done = 0
        while done < len(content):
            rest = memoryview(content)[done:]
            done += os.write(descriptor, rest) if offset is None else os.pwrite(descriptor, rest, offset + done)
    finally:
        os.close(descriptor)
