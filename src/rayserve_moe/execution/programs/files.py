"""Compiled programs as files that only this user can write: each is read whole, or not at all.

Loading a program runs what its file says, so a directory or a file that another user could have written is refused.
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


class ProgramFiles:
    """Payloads by key in a directory; beyond `most_bytes` those go first that were not used for the longest time.

    Any number of processes may read and write at once. OSError where the directory cannot be made; PermissionError
    where others can write to it.
    """

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        make_private(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass  # a directory that takes no file says so now

    def read(self, key: str) -> bytes | None:
        """What was written under this key; None where there is nothing, or something that cannot be trusted."""
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
            log.warning("a program on disk is damaged, and compiled again: %s", path)
            return None
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Put a payload in place of what is there, at once; a disk that takes none is logged."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=f"{key}-", delete=False) as file:
                partial = Path(file.name)
                try:
                    file.writelines((_digest(key, payload), payload))
                    file.flush()
                    partial.replace(self._directory / key)
                finally:
                    partial.unlink(missing_ok=True)
            self._drop_oldest()
        except OSError as error:
            log.warning("a compiled program is not kept: %s", error)

    def _drop_oldest(self) -> None:
        """Keep to the bound; what interrupted processes left counts, and grows old, like everything else."""
        files = sorted(self._stats(), key=lambda found: found[1].st_mtime_ns)
        excess = sum(status.st_size for _, status in files) - self._most_bytes
        for path, status in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= status.st_size

    def _stats(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):
                found.append((path, path.lstat()))
        return found


def make_private(directory: Path) -> None:
    """Make a directory that only this user can write to. OSError where that is not possible, or others can write."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_ours(directory.lstat(), directory)


def _open_here(path: str, flags: int) -> int:
    """Open no link, and wait for no writer."""
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
