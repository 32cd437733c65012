"""Processes of this machine, read from /proc: finding, signalling and ending our own."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_ZOMBIE = "Z"
_OF_TERMINAL = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else set()
STOPS = frozenset({signal.SIGTERM, signal.SIGINT} | _OF_TERMINAL)
"""Signals that stop a server; SIGHUP too unless it is ignored, as by `nohup`."""
AWAITED = STOPS | {signal.SIGCHLD}
"""Signals that the supervisor awaits: blocked in it, and in its children until `join_parent`."""


@dataclass(frozen=True)
class Process:
    """Process of this machine."""

    pid: int
    parent: int
    started: int
    """Clock ticks since boot; distinguishes it from a later process with the same id."""
    user: int
    arguments: tuple[str, ...]
    has_ended: bool = False
    """True for a zombie; its threads may still hold sockets."""

    @property
    def title(self) -> str:
        """Return an abbreviated command line, for messages."""
        return " ".join(self.arguments)[:80] or "?"


def read_process(pid: int) -> Process | None:
    """Return the process with this id, or None."""
    folder = _PROC / str(pid)
    try:
        user = folder.stat().st_uid
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        arguments = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), user, tuple(arguments), fields[0] == _ZOMBIE)


def all_processes() -> dict[int, Process]:
    """Return every visible process, by id."""
    found = (read_process(int(entry.name)) for entry in _PROC.glob("[0-9]*"))
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return all descendants of `root`."""
    children = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process)
    family, pids = [], [root]
    for pid in pids:
        family += children[pid]
        pids += [child.pid for child in children[pid]]
    return family


def own_by_path(folder: Path, processes: Iterable[Process], *, user: int) -> list[Process]:
    """Return the user's processes with a path in `folder` on their command line."""
    prefix = f"{folder}/"
    return [p for p in processes if p.user == user and any(word.startswith(prefix) for word in p.arguments)]


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to the processes that are still running."""
    for process in processes:
        current = read_process(process.pid)
        if current is not None and current.started == process.started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def end(
    find: Callable[[], list[Process]], *, first: signal.Signals, grace_s: float, limit_s: float = 20.0
) -> list[Process]:
    """End the processes that `find` returns until none is left: by the `first` signal, after `grace_s` by SIGKILL.

    It reaps ended children and returns the remaining processes after `limit_s`.
    """
    start = time.monotonic()
    if grace_s > 0:
        send(find(), first)
    while (left := find()) and (waited := time.monotonic() - start) < limit_s:
        if waited >= grace_s:
            send(left, signal.SIGKILL)
        time.sleep(0.05)
        collect_children()
    return left


def collect_children() -> dict[int, int]:
    """Reap every ended child; return exit codes by id, negative for a signal."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def join_parent() -> None:
    """Unblock signals and request SIGKILL at the supervisor's end; must be the first call of the supervisor's child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl has failed")
