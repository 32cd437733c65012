"""Runs that other processes of the machine did not disturb: how much of the cores they used, and another try."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.conditions import num_cores

MAX_TRIES = 6
PROC = Path("/proc")
BUSY = (0, 1, 2, 5, 6)
"""Columns of time in which the machine computes: in user code, at low priority, in the system and in interrupts."""
Result = TypeVar("Result")


def others_seconds() -> float:
    """Return processor seconds of all processes but this one and its descendants; Linux only."""
    columns = (PROC / "stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    processes = dict(filter(None, (_process(path) for path in PROC.iterdir() if path.name.isdigit())))
    own = {os.getpid()}
    while found := {pid for pid, (parent, _) in processes.items() if parent in own} - own:
        own |= found
    ticks = sum(int(columns[i]) for i in BUSY) - sum(processes[pid][1] for pid in own & processes.keys())
    return ticks / os.sysconf("SC_CLK_TCK")


def _process(path: Path) -> tuple[int, tuple[int, int]] | None:
    """Return the id of a process, its parent's, and its processor time in ticks; None if it has ended."""
    try:
        fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(path.name), (int(fields[1]), int(fields[11]) + int(fields[12]))


def undisturbed(
    run: Callable[[], Result], max_share: float, *, seconds: Callable[[], float] = others_seconds
) -> tuple[Result, float]:
    """Run until other processes use at most `max_share` of the cores, MAX_TRIES times at most.

    Returns: the result that was disturbed the least, and the share of others during it.
    """
    tries: list[tuple[float, Result]] = []
    while not tries or (tries[-1][0] > max_share and len(tries) < MAX_TRIES):
        before, started = seconds(), time.perf_counter()
        result = run()
        elapsed = time.perf_counter() - started
        tries.append((max(0.0, seconds() - before) / (elapsed * num_cores()), result))
    share, result = min(tries, key=lambda each: each[0])
    return result, share
