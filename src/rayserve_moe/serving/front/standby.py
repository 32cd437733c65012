"""Process that runs a substitute HAProxy while Ray replaces its own, after HAProxy or its managing actor was killed.

    python -m rayserve_moe.serving.front.standby STATE_FOLDER

Ray notices after three failed checks, starts a manager and that manager's HAProxy: about 6 s. This process starts a
HAProxy at once, with the last configuration that served and its own sockets. The launcher then makes Ray's next HAProxy
take over from it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rayserve_moe.cluster.process_end import wait_for_end
from rayserve_moe.serving.front.processes import ADMIN_SOCKET, BINARY, STANDBY_SOCKET, Handed, running_pid
from rayserve_moe.serving.start.processes import join_parent

LOOK_S = 0.25
"""Maximum delay before a replaced HAProxy is noticed."""
RETRY_S = 0.02
AGAIN_S = 0.5
"""Seconds between two starts, so that a HAProxy that cannot start does not occupy a core."""
CONFIG = "haproxy.cfg"
_STANDBY = "standby"


class Standby:
    """Watcher of the HAProxy of a configuration file."""

    def __init__(self, config: Path) -> None:
        self._config, self._admin = config, config.with_name(ADMIN_SOCKET)
        self._own = config.with_name(STANDBY_SOCKET)
        self.served: Handed | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._started_at = -AGAIN_S
        self._known_pid, self._takes_requests, self._has_said = 0, False, False

    def look(self) -> None:
        """Check once, for at most `LOOK_S`: start a HAProxy if none serves, end it when another has taken over."""
        pid = running_pid(self._admin)
        self.processes = [process for process in self.processes if process.poll() is None]
        if pid is not None and pid != self._known_pid:
            self._know(pid)
        if pid is None or not self._takes_requests:
            is_due = time.monotonic() - self._started_at >= AGAIN_S
            if self.served is not None and is_due and running_pid(self._own) is None:
                self.processes.append(self._start(self.served))
        if pid is None:
            time.sleep(RETRY_S)
            return
        if self.processes and self._has_taken_over(pid):
            for process in self.processes:
                process.send_signal(signal.SIGUSR1)  # HAProxy sends it too, but its signal may be lost
        wait_for_end(pid, LOOK_S)

    def _know(self, pid: int) -> None:
        """Record what a running process was configured by, once that is written."""
        self._takes_requests, self._has_said = True, False  # assumed until the file is read
        handed = Handed.read(self._config.parent)
        if handed.pid != pid:
            return
        self._known_pid, self._takes_requests = pid, handed.takes_requests
        if handed.takes_requests:
            self.served = handed if handed.has_replicas else None

    def _has_taken_over(self, pid: int) -> bool:
        with suppress(OSError):
            return os.fsencode(self._own) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return False

    def _start(self, served: Handed) -> subprocess.Popen[bytes]:
        """Start a HAProxy with sockets of its own: one that cannot bind the ports has replaced the sockets by then."""
        self._started_at, config = time.monotonic(), self._config.with_name(f"{_STANDBY}.cfg")
        config.write_text(served.config, encoding="utf-8")
        config.with_suffix(".lua").write_text(served.script, encoding="utf-8")
        with self._config.with_name(f"{_STANDBY}.log").open("wb") as log:
            if not self._has_said:
                sys.stderr.write("rayserve-moe serve: HAProxy does not serve; another does until Ray has its own\n")
            self._has_said = True
            command = [BINARY, "-db", "-f", config, "-dR"]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def answering(folder: Path) -> Path | None:
    """Return the configuration of an answering HAProxy, or None; a killed start may have left other files."""
    for config in folder.glob(f"*/{CONFIG}"):
        with suppress(OSError):
            if running_pid(config.with_name(ADMIN_SOCKET)) is not None:
                return config
    return None


def main() -> None:
    """Watch until the supervisor ends."""
    join_parent()
    folder = Path(sys.argv[1])
    while (config := answering(folder)) is None:
        time.sleep(LOOK_S)
    standby = Standby(config)
    while True:
        try:
            standby.look()
        except OSError:
            time.sleep(RETRY_S)  # a file or socket is being replaced and returns soon


if __name__ == "__main__":
    main()
