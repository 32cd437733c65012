"""Processes that a test has started, told from everybody else's on the machine."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def descendants(*titles: str, root: int | None = None) -> list[int]:
    """Processes below `root` (this one by default) whose titles begin so; nobody else's are ever among them."""
    children, title_of = defaultdict(list), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            title_of[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
            parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(entry.name))
    family = [os.getpid() if root is None else root]
    for pid in family:
        family += children[pid]
    return [pid for pid in family if title_of.get(pid, "").startswith(titles)]
