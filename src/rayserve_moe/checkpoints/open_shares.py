"""Files of memory that hold a host's share of weights: opened in one process, and from there in others of the machine.

Such a file has no name. Its memory is free once no process has it open.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple


class SharePlace(NamedTuple):
    """A share of the weights `token`, open in a process of this machine as the file `fd`."""

    token: str
    pid: int
    fd: int


@dataclass(frozen=True)
class WeightShare:
    """An open share; `close` gives up this process's part in it."""

    token: str
    fd: int

    @property
    def place(self) -> SharePlace:
        return SharePlace(self.token, os.getpid(), self.fd)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        os.close(self.fd)


def open_share(place: SharePlace) -> WeightShare:
    """Open a share that another process of this machine has open. OSError where that has ended."""
    return WeightShare(place.token, os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC))
