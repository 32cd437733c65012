"""In-memory files with a host's share of weights: created by a process and opened by others of the machine.

Such a file has no name. Its memory is freed once no process has it open. Once written it is sealed (`F_SEAL_WRITE` and
others): no process can change or truncate it while others have it mapped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
MAX_WRITTEN_BYTES = 64 << 20
"""Maximum bytes written per call; other threads run in between."""


class SharePlace(NamedTuple):
    """A share of weights that is open in a process of this machine."""

    token: str
    """Identifies the weights."""
    pid: int
    fd: int


class ShareBytes(NamedTuple):
    """A share that is open elsewhere: `read(start, stop)` returns a copy of its bytes, uint8."""

    token: str
    num_bytes: int
    read: Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class WeightShare:
    """An open share; `close` closes it in this process."""

    token: str
    fd: int

    @property
    def place(self) -> SharePlace:
        return SharePlace(self.token, os.getpid(), self.fd)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of the bytes from `start` to `stop`, or to the end, uint8."""
        found, done = np.empty(stop - start, np.uint8), 0
        while done < len(found) and (more := os.preadv(self.fd, [found[done:].data], start + done)):
            done += more
        return found[:done]

    def write(self, raw: np.ndarray, offset: int) -> None:
        """Write bytes, uint8, at an offset. Raises OSError without memory for them, and after sealing."""
        done = 0
        while done < len(raw):
            done += os.pwrite(self.fd, raw[done : done + MAX_WRITTEN_BYTES].data, offset + done)

    def close(self) -> None:
        os.close(self.fd)


AnyShare = WeightShare | ShareBytes


def open_share(place: SharePlace) -> WeightShare:
    """Open a share that another process of this machine has open. Raises OSError if that process has ended."""
    return WeightShare(place.token, os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def written_share(token: str) -> Generator[WeightShare]:
    """Yield a share to be filled by `write`; seal it at the end, or close it after an error."""
    share = WeightShare(token, os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    with ExitStack() as undo:
        undo.callback(share.close)
        yield share
        fcntl.fcntl(share.fd, fcntl.F_ADD_SEALS, SEALS)
        undo.pop_all()
