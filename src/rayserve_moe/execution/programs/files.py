"""Compiled programs as files that only this user can write; each is read entirely or not at all.

Loading a program executes the content of its file, so files and directories that another user could have written are
rejected.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

DIGEST_BYTES = 32
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
CHECKS = 256
"""Number of checks of the directory's size per `max_bytes` written. A check reads the size of every file."""


class ProgramFiles:
    """Payloads by key in a directory; beyond `max_bytes` the least recently used are deleted.

    Any number of processes may read and write at once. Each may exceed the bound by `max_bytes / CHECKS`.

    Raises: OSError if the directory cannot be made, PermissionError if others can write to it.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._unchecked_bytes = max_bytes
        """Bytes written since the last check of the directory; the first write checks it."""
        make_private(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass  # fail now if the directory is not writable

    def read(self, key: str) -> bytes | None:
        """Return the payload of a key; None if it is missing or cannot be trusted."""
        path = self._directory / key
        try:
            with open(path, "rb", opener=_open_here) as file:
                check_ours(os.fstat(file.fileno()), path)
                stored = file.read()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a program on disk is not used: %s", error)
            return None
        payload = stored[DIGEST_BYTES:]
        if stored[:DIGEST_BYTES] != _digest(key, payload):
            log.warning("a program on disk is damaged, recompiling it: %s", path)
            return None
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Replace the payload of a key atomically; write errors are logged."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=f"{key}-", delete=False) as file:
                partial = Path(file.name)
                try:
                    file.writelines((_digest(key, payload), payload))
                    file.flush()
                    partial.replace(self._directory / key)
                finally:
                    partial.unlink(missing_ok=True)
            self._unchecked_bytes += len(payload)
            if self._unchecked_bytes * CHECKS >= self._max_bytes:
                self._unchecked_bytes = 0
                self._drop_oldest()
        except OSError as error:
            log.warning("a compiled program is not kept: %s", error)

    def _drop_oldest(self) -> None:
        """Delete the oldest files beyond the bound, including partial files of interrupted processes."""
        files = self._files()
        excess = sum(size for _, size, _ in files) - self._max_bytes
        if excess <= 0:
            return
        for _, size, path in sorted(files):
            Path(path).unlink(missing_ok=True)
            excess -= size
            if excess <= 0:
                return

    def _files(self) -> list[tuple[int, int, str]]:
        """Return the modification time in ns, the bytes and the path of each file."""
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        return found


def make_private(directory: Path) -> None:
    """Make a directory that only this user can write to.

    Raises: OSError if that is not possible, or others can write to it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_ours(directory.lstat(), directory)


def _open_here(path: str, flags: int) -> int:
    """Open a file without following links or waiting for a writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def check_ours(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError for a file or directory that another user could have written, and for links."""
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    if not is_plain or status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(
            f"{path} must belong to user {os.geteuid()} and be writable for no other user: programs in it are run "
            f"(it is {stat.filemode(status.st_mode)} of user {status.st_uid})"
        )


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()
