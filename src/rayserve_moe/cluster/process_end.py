"""Waiting for the end of a process that need not be a child."""

from __future__ import annotations

import os
import select


def wait_for_end(pid: int, seconds: float | None = None) -> None:
    """Wait until a process has ended, for at most `seconds`."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(None if seconds is None else 1000 * seconds)
    finally:
        os.close(process)
