"""Folder of programs that XLA has compiled for tests, which later runs on the same processor read."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import jaxlib

MAX_BYTES = 4 << 30
"""Size of the folder after `prune`."""
MIN_AGE_S = 86_400
"""Age below which a program is kept, since another run may be reading it."""


def program_folder(fallback: Path) -> Path:
    """Return the folder for this processor and version of XLA, or `fallback` if it cannot be written.

    Programs hold instructions of the processor that they were compiled on, and a home may move to another one.
    """
    processor = "".join(sorted({line for line in _cpu_lines() if line.startswith(("flags", "Features", "model name"))}))
    key = hashlib.sha256(f"{jaxlib.__version__} {processor}".encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "rayserve_moe" / "test-programs" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK) else fallback


def prune(folder: Path, *, max_bytes: int = MAX_BYTES, min_age_s: float = MIN_AGE_S) -> int:
    """Remove the oldest programs until the folder has at most `max_bytes`; return the number of removed files."""
    files = []
    for path in folder.glob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        files.append((found.st_mtime, found.st_size, path))
    surplus, newest, num_removed = sum(size for _, size, _ in files) - max_bytes, time.time() - min_age_s, 0
    for modified, size, path in sorted(files):
        if surplus <= 0 or modified > newest:
            break
        path.unlink(missing_ok=True)
        surplus, num_removed = surplus - size, num_removed + 1
    return num_removed


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
