"""A worker of Ray that ends with its raylet: the cluster counts it as lost then, and replaces it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rayserve_moe.cluster.process_end import wait_for_end

RAYLET = "raylet"
FAILED = 1


def end_with_raylet() -> None:
    """Have this process end at once where its raylet does; does nothing in a process that no raylet has started.

    Ray's own workers notice at their next call to the raylet, which can take minutes: until then a replica that is
    replaced already keeps its connections, and a worker its devices.
    """
    parent = os.getppid()
    if Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip() == RAYLET:
        threading.Thread(target=_end_after, args=(parent,), name=RAYLET, daemon=True).start()


def _end_after(raylet: int) -> None:
    try:
        wait_for_end(raylet)
    finally:
        os._exit(FAILED)
