"""Files of a checkpoint behind a URL, read by byte ranges through the interface of local files.

A `RemoteDirectory` takes the place of a local checkpoint's `Path`. Its files are opened by `opened_anywhere`.
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
"""Maximum range of a request, and so the maximum that is read again after a lost connection."""
NUM_CONNECTIONS = 64
"""Concurrent range reads of a load; the bytes in flight are at most this times RANGE_BYTES."""
CONNECT_TIMEOUT_S, SILENT_TIMEOUT_S = 15.0, 30.0
TIMEOUT = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENT_TIMEOUT_S)
OPTIONS: dict[str, dict[str, Any]] = {
    "http": {"client_kwargs": {"timeout": TIMEOUT}, "encoded": True},
    "https": {"client_kwargs": {"timeout": TIMEOUT}, "encoded": True},
    "gs": {"session_kwargs": {"timeout": TIMEOUT}, "cache_timeout": 0},
}
"""Arguments of fsspec's file systems."""
EXTRAS = {"gs": "gcs", "gcs": "gcs"}
"""This package's extra that installs a scheme's library."""
BUCKETS = {"gs", "gcs", "s3"}
VERSION_KEYS = ("generation", "etag", "ETag", "mtime", "LastModified", "updated", "created")


@dataclass(frozen=True)
class RemoteStamp:
    """Identifies the content of a remote file."""

    num_bytes: int
    version: str
    """The store's version of the file."""


class Store(Protocol):
    """A store of remote files. Both methods raise any errors of the store's library."""

    def stamp(self, name: str) -> RemoteStamp:
        """Return a file's size and version. Raises FileNotFoundError if it does not exist."""
        ...

    def read(self, name: str, *, start: int, end: int) -> bytes:
        """Read bytes `[start, end)` of a file; fewer if it ends before."""
        ...


@dataclass(frozen=True)
class RemoteDirectory:
    """A checkpoint's directory behind a URL."""

    url: str
    """Includes the revision if the store has several."""
    store: Store = field(compare=False, repr=False)
    cache: RangeCache | None = field(default=None, compare=False, repr=False)
    """Keeps reads on disk."""
    stamps: dict[str, RemoteStamp] = field(default_factory=dict, compare=False, repr=False)
    """Known stamps of its files."""

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(self, name)

    def __str__(self) -> str:
        return self.url

    def stamp(self, name: str, reach: Reach = ANYWHERE) -> RemoteStamp:
        """Return size and version of a file, requested once. Raises GivenFileError, MissingFileError if it does not
        exist.
        """
        if name not in self.stamps:
            self.stamps[name] = attempted(lambda: self.store.stamp(name), given_up=reach.given_up)
        return self.stamps[name]

    def renewed(self) -> RemoteDirectory:
        """Return the directory without known stamps."""
        return RemoteDirectory(self.url, self.store, self.cache)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote checkpoint, the counterpart of a local `Path`."""

    parent: RemoteDirectory
    name: str

    def __str__(self) -> str:
        return f"{self.parent.url}/{self.name}"


AnyDirectory = Path | RemoteDirectory
AnyFile = Path | RemoteFile
AnyStamp = FileStamp | RemoteStamp


@dataclass(frozen=True)
class RemoteBytes:
    """An open remote file, the counterpart of a local GivenFile."""

    file: RemoteFile
    stamp: RemoteStamp
    reach: Reach

    @property
    def num_bytes(self) -> int:
        return self.stamp.num_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from `offset` on. Raises GivenFileError if the file ends before or cannot be read."""
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
            raise GivenFileError(
                f"the server sends {len(content)} bytes for a range of {end - start}: it ignores ranges"
            )
        if directory.cache:
            directory.cache.write(name, self.stamp.version, start=start, content=content)
        return content


@contextmanager
def opened_anywhere(file: AnyFile, reach: Reach = ANYWHERE) -> Generator[GivenFile | RemoteBytes]:
    """Open a local or remote file. Raises GivenFileError if it is missing or unreadable."""
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
    """A folder of any file system that fsspec supports."""

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
            raise ValueError("the server does not report its size")
        return RemoteStamp(int(found["size"]), next((str(found[key]) for key in VERSION_KEYS if found.get(key)), ""))

    def read(self, name: str, *, start: int, end: int) -> bytes:
        return self._opened().cat_file(f"{self._folder}/{name}", start=start, end=end)

    def check_bucket(self) -> None:
        """Raise ValueError with the bucket's name if the folder's bucket does not exist."""
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
    """Return the directory at a URL of fsspec; nothing is requested yet."""
    scheme, _, rest = url.partition("://")
    place = f"{scheme}://{rest.rstrip('/')}"
    if not rest.strip("/") or posixpath.normpath(rest.rstrip("/")) != rest.rstrip("/"):
        raise GivenFileError("not a URL of a folder: scheme://bucket/folder, without . or ..")
    return RemoteDirectory(place, FolderStore(place), cache)
