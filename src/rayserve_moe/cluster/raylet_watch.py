"""Termination of a Ray worker together with its raylet, because the cluster then counts it as lost and replaces it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from rayserve_moe.cluster.process_end import wait_for_end
from rayserve_moe.config.load import variable

RAYLET = "raylet"
RAYLET_PID = "RAY_RAYLET_PID"
"""Environment variable with the raylet's pid; a worker forked by another process is not its child."""
FAILED = 1


def end_with_raylet() -> None:
    """End this process at once when its raylet ends. Does nothing in a process that no raylet has started.

    Ray's own workers notice at their next call to the raylet, which can take minutes. Until then a replaced replica
    keeps its connections, and a worker its devices.
    """
    for pid in (os.getppid(), int(variable(RAYLET_PID) or 0)):
        if pid and _is_raylet(pid):
            threading.Thread(target=_end_after, args=(pid,), name=RAYLET, daemon=True).start()
            return


def _is_raylet(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == RAYLET
    return False


def _end_after(raylet: int) -> None:
    try:
        wait_for_end(raylet)
    finally:
        os._exit(FAILED)
