"""Process that a start command becomes: the parent of all processes of the start, which it ends.

    python -m rayserve_moe.serving.start.supervisor STATE_FOLDER

It imports neither Ray nor jax; `deployment` decides what to serve and when.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rayserve_moe.config.load import inherited_environment
from rayserve_moe.serving.start.processes import (
    AWAITED,
    STOPS,
    Process,
    adopt_orphans,
    all_processes,
    collect_children,
    descendants,
    end,
    own_by_path,
)
from rayserve_moe.serving.start.state import Plan, log_folder, remove

FAILED = 1
DEPLOYMENT_FAILED, UNANSWERED = 3, 4
"""Exit statuses of the deployment: it has reported why it cannot serve; a request had to be ended at its stop."""
STANDBY, FORK_SERVER = "standby", "fork_server"
RAY_JOB_ID, RAY_RAYLET_PID = "RAY_JOB_ID", "RAY_RAYLET_PID"
"""Variables that Ray's library reads at import, in the fork server: a worker's job, and the process whose end ends it.

A worker without a job accepts the tasks of any job. The fork server ends with its raylet, and all workers with it.
"""
NO_JOB = "ffffffff"
_GRACE_S = 3.0
"""Seconds for processes to end by themselves after a drain."""
_FLUSH_S = 5.0
"""Seconds for HAProxy to send the last bytes of answers."""
_DRAIN_SLACK_S = 30.0
"""Seconds beyond `drain_timeout_s` before a drain has failed."""
_RESTART_S = 0.1
"""Seconds before a process is restarted, so that one that cannot start does not occupy a core."""
_LOG = "ray.log"
_LAST_LINES = 4
"""Number of last lines of a log, printed if its process has ended."""


class Ended(NamedTuple):
    """End of the command."""

    status: int
    """Exit status."""
    is_orderly: bool = False
    """True if the other processes may end by themselves."""
    is_stopped: bool = False
    """True if the command was stopped by a signal."""


def main() -> int:
    """Run the deployment of a state folder to its end; return the exit status of the command.

    It is 0 after a drain, 1 after a failure or an aborted request, and 128 + its number after a second signal.
    """
    folder = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    adopt_orphans()
    end_of = Ended(FAILED)
    try:
        plan = Plan.read(folder)
        _say("starting Ray")
        logs = log_folder(folder)
        with (logs / _LOG).open("wb") as log:
            ray = _start("cluster", folder, output=log)
        # Handles of Serve need this outside of an event loop.
        deployment = _start("deployment", folder, RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="1")
        names = (FORK_SERVER, *(("journal",) if plan.journal_max_bytes else ()), STANDBY)
        kept = {name: _start(name, folder) for name in names}
        end_of = _watch(ray, deployment, kept, plan=plan, folder=folder)
    finally:
        if end_of.is_orderly:
            end(lambda: own_by_path(folder, _family(), user=os.getuid()), first=signal.SIGUSR1, grace_s=_FLUSH_S)
        left = end(_family, first=signal.SIGTERM, grace_s=_GRACE_S if end_of.is_orderly else 0.0)
        if left:
            sys.stderr.write(f"rayserve-moe serve: process {left[0].pid} ({left[0].title}) does not end\n")
        remove(folder)
    if end_of.is_stopped:
        _say("stopped")
    return end_of.status


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.write(f"rayserve-moe serve: {line}\n")
        sys.stdout.flush()


def _start(name: str, folder: Path, *, output: BinaryIO | None = None, **more: str) -> int:
    """Start a module of this package, or the standby, in its own session, which a terminal's Ctrl-C does not reach."""
    package = "rayserve_moe.serving.front" if name == STANDBY else __package__
    command = [sys.executable, "-m", f"{package}.{name}", str(folder)]
    environment = {**inherited_environment(), **more}
    with ExitStack() as files:
        if name == FORK_SERVER:
            environment |= {RAY_JOB_ID: NO_JOB, RAY_RAYLET_PID: str(os.getpid())}
            output = files.enter_context((log_folder(folder) / f"{name}.log").open("ab"))
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return child.pid


def _watch(ray: int, deployment: int, kept: dict[str, int], *, plan: Plan, folder: Path) -> Ended:
    """Wait for the end of the deployment.

    `kept` are processes that are restarted if they end. The standby is ended when a drain begins.
    """
    deadline: float | None = None
    while True:
        found = _next_signal(deadline)
        if found in (signal.SIGTERM, signal.SIGINT) and deadline is not None:  # a terminal may repeat its own signal
            return Ended(128 + found)
        if found in STOPS and deadline is None:
            deadline = time.monotonic() + plan.drain_timeout_s + _DRAIN_SLACK_S
            os.kill(deployment, signal.SIGTERM)
            _end_standby(kept)
        ended = collect_children()
        for name in [name for name, pid in kept.items() if pid in ended]:
            sys.stderr.write(f"rayserve-moe serve: {_restart(name, ended[kept[name]], folder)}\n")
            time.sleep(_RESTART_S)
            kept[name] = _start(name, folder)
        if deployment in ended:
            _end_standby(kept)
            return _ended(ended[deployment], is_stopping=deadline is not None, folder=folder)
        if ray in ended:
            logs = log_folder(folder)
            fault = f"Ray has ended: {_last_of(logs / _LOG) or 'no output'}; logs: {logs}"
            sys.stderr.write(f"rayserve-moe serve: {fault}\n")
            return Ended(FAILED)
        if found is None:
            sys.stderr.write("rayserve-moe serve: the drain did not end in time\n")
            return Ended(FAILED)


def _restart(name: str, code: int, folder: Path) -> str:
    """Return a message with the exit code of an ended process and the last lines of its log."""
    logs = log_folder(folder)
    how = [f"signal {-code}" if code < 0 else f"status {code}", _last_of(logs / f"{name}.log")]
    return f"the process of {name} has ended ({': '.join(filter(None, how))}), and is started again; logs: {logs}"


def _last_of(log: Path) -> str:
    """Return the last lines of a log on a single line; empty without a log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return " | ".join([" ".join(line.split()) for line in lines if line.strip()][-_LAST_LINES:])


def _ended(status: int, *, is_stopping: bool, folder: Path) -> Ended:
    """Return the end of the command for the deployment's exit status; report it if the deployment has not."""
    if status in (0, UNANSWERED):
        return Ended(FAILED if status else 0, is_orderly=True, is_stopped=True)
    if is_stopping and status != DEPLOYMENT_FAILED:  # stopped before it could handle the signal
        return Ended(0, is_orderly=True, is_stopped=True)
    if status != DEPLOYMENT_FAILED:
        fault = f"the process that deploys has ended with status {status}; logs: {log_folder(folder)}"
        sys.stderr.write(f"rayserve-moe serve: {fault}\n")
    return Ended(FAILED, is_orderly=True)


def _end_standby(kept: dict[str, int]) -> None:
    if (pid := kept.pop(STANDBY, None)) is not None:
        os.kill(pid, signal.SIGKILL)


def _next_signal(deadline: float | None) -> int | None:
    """Wait for a signal; return None after the deadline."""
    if deadline is None:
        return signal.sigwait(AWAITED)
    found = signal.sigtimedwait(AWAITED, max(0.0, deadline - time.monotonic()))
    return None if found is None else found.si_signo


def _family() -> list[Process]:
    return descendants(os.getpid(), all_processes())


if __name__ == "__main__":
    sys.exit(main())
