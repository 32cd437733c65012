"""Files of a checkpoint that lies behind a URL, read by ranges of bytes with the interface of local ones.

`RemoteDirectory` stands where a `Path` of a local checkpoint does. Its files are opened by `opened_anywhere`.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import fsspec
from aiohttp import ClientTimeout

from rayserve_moe.checkpoints.range_cache import RangeCache
from rayserve_moe.checkpoints.transfer import MissingFileError, attempted
from rayserve_moe.config.given_files import ANYWHERE, FileStamp, GivenFile, GivenFileError, Reach, opened

RANGE_BYTES = 8 << 20
"""Longest range of one request, and so the most that a cut connection has to read again."""
NUM_CONNECTIONS = 64
"""Ranges that a load reads at once: RANGE_BYTES each are the most bytes in flight."""
CONNECT_TIMEOUT_S, SILENT_TIMEOUT_S = 15.0, 30.0
TIMEOUT = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENT_TIMEOUT_S)
OPTIONS: dict[str, dict[str, Any]] = {
    "http": {"client_kwargs": {"timeout": TIMEOUT}, "encoded": True},
    "https": {"client_kwargs": {"timeout": TIMEOUT}, "encoded": True},
    "gs": {"session_kwargs": {"timeout": TIMEOUT}, "cache_timeout": 0},
}
"""Arguments of fsspec's file systems."""
EXTRAS = {"gs": "gcs", "gcs": "gcs"}
"""The extra of this package that brings a scheme's library."""
BUCKETS = {"gs", "gcs", "s3"}
VERSION_KEYS = ("generation", "etag", "ETag", "mtime", "LastModified", "updated", "created")


@dataclass(frozen=True)
class RemoteStamp:
    """Identifies the content of a remote file: its size, and what its store calls its version."""

    num_bytes: int
    version: str


class Store(Protocol):
    """Where remote files lie. Both methods raise whatever the store's library does."""

    def stamp(self, name: str) -> RemoteStamp:
        """Ask for a file's size and version; FileNotFoundError where there is none."""
        ...

    def read(self, name: str, *, start: int, end: int) -> bytes:
        """Read bytes `[start, end)` of a file; fewer where it ends before."""
        ...


@dataclass(frozen=True)
class RemoteDirectory:
    """A checkpoint's directory behind a `url`, which names the revision where there are several.

    `stamps` has what is known of its files; `cache` keeps on disk what was read.
    """

    url: str
    store: Store = field(compare=False, repr=False)
    cache: RangeCache | None = field(default=None, compare=False, repr=False)
    stamps: dict[str, RemoteStamp] = field(default_factory=dict, compare=False, repr=False)

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(self, name)

    def __str__(self) -> str:
        return self.url

    def stamp(self, name: str, reach: Reach = ANYWHERE) -> RemoteStamp:
        """Size and version of a file, asked for once; GivenFileError, MissingFileError where there is none."""
        if name not in self.stamps:
            self.stamps[name] = attempted(lambda: self.store.stamp(name), given_up=reach.given_up)
        return self.stamps[name]

    def renewed(self) -> RemoteDirectory:
        """The same, with nothing known of its files."""
        return RemoteDirectory(self.url, self.store, self.cache)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote checkpoint, as a `Path` names a local one."""

    parent: RemoteDirectory
    name: str

    def __str__(self) -> str:
        return f"{self.parent.url}/{self.name}"


AnyDirectory = Path | RemoteDirectory
AnyFile = Path | RemoteFile
AnyStamp = FileStamp | RemoteStamp


@dataclass(frozen=True)
class RemoteBytes:
    """An open remote file: what GivenFile is for a local one."""

    file: RemoteFile
    stamp: RemoteStamp
    reach: Reach

    @property
    def num_bytes(self) -> int:
        return self.stamp.num_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from `offset` on. GivenFileError where the file ends before, or cannot be read."""
        for start in range(0, len(buffer), RANGE_BYTES):
            part = buffer[start : start + RANGE_BYTES]
            self.reach.check_wanted()
            part[:] = self._range(offset + start, offset + start + len(part))

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """Copy `num_bytes` from `offset` on."""
        content = bytearray(num_bytes)
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def _range(self, start: int, end: int) -> bytes:
        directory, name = self.file.parent, self.file.name
        kept = directory.cache.read(name, self.stamp.version, span=(start, end)) if directory.cache else None
        if kept is not None:
            return kept
        content = attempted(lambda: directory.store.read(name, start=start, end=end), given_up=self.reach.given_up)
        if len(content) < end - start:
            raise GivenFileError(f"truncated: it ends at byte {start + len(content)} of {end}")
        if len(content) > end - start:
            raise GivenFileError(f"the server sends {len(content)} bytes for a range of {end - start}: no ranges there")
        if directory.cache:
            directory.cache.write(name, self.stamp.version, start=start, content=content)
        return content


@contextmanager
def opened_anywhere(file: AnyFile, reach: Reach = ANYWHERE) -> Generator[GivenFile | RemoteBytes]:
    """Open a file, local or remote. GivenFileError for a missing or unreadable one."""
    if isinstance(file, Path):
        with opened(file, reach) as given:
            yield given
    else:
        reach.check_wanted()
        try:
            stamp = file.parent.stamp(file.name, reach)
        except MissingFileError as error:
            raise GivenFileError("file is missing") from error
        yield RemoteBytes(file, stamp, reach)


class FolderStore:
    """A folder of any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        self._scheme = url.partition("://")[0]
        self._folder = url if self._scheme in ("http", "https") else url.partition("://")[2]
        self._system: Any = None
        self._opening = threading.Lock()

    def stamp(self, name: str) -> RemoteStamp:
        system = self._opened()
        system.invalidate_cache()
        found = system.info(f"{self._folder}/{name}")
        if found.get("type") != "file":
            raise FileNotFoundError(name)
        if found.get("size") is None:
            raise ValueError("the server does not say how long it is")
        return RemoteStamp(int(found["size"]), next((str(found[key]) for key in VERSION_KEYS if found.get(key)), ""))

    def read(self, name: str, *, start: int, end: int) -> bytes:
        return self._opened().cat_file(f"{self._folder}/{name}", start=start, end=end)

    def check_bucket(self) -> None:
        """ValueError, naming it, where the bucket of the folder does not exist."""
        bucket = self._folder.partition("/")[0]
        if self._scheme in BUCKETS:
            try:
                self._opened().ls(bucket)
            except FileNotFoundError as error:
                raise ValueError(f"bucket {bucket} does not exist") from error

    def _opened(self) -> Any:
        with self._opening:
            if self._system is None:
                try:
                    self._system = fsspec.filesystem(self._scheme, **OPTIONS.get(self._scheme, {}))
                except ImportError as error:
                    extra = EXTRAS.get(self._scheme)
                    needed = f"pip install 'rayserve_moe[{extra}]'" if extra else str(error)
                    raise ImportError(f"{self._scheme}:// needs its library: {needed}") from error
            return self._system


def folder_at(url: str, cache: RangeCache | None = None) -> RemoteDirectory:
    """The directory at a URL of fsspec's; nothing is asked of it yet."""
    scheme, _, rest = url.partition("://")
    place = f"{scheme}://{rest.rstrip('/')}"
    if not rest.strip("/") or posixpath.normpath(rest.rstrip("/")) != rest.rstrip("/"):
        raise GivenFileError("not a URL of a folder: scheme://bucket/folder, without . or ..")
    return RemoteDirectory(place, FolderStore(place), cache)
