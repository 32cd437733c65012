"""A server started by the command, as users start it, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from rayserve_moe.serving.start.ports import BLOCK_SIZE
from rayserve_moe.serving.start.processes import Process, all_processes, descendants
from rayserve_moe.serving.start.state import Plan
from tests.support.session.xla_flags import flags_of_children

SERVED_WITHIN_S = 600.0
ENDS_WITHIN_S = 120.0
OF_TESTS = "RAY_"
"""Variables of the test process that users do not have."""


class StartedServer:
    """`rayserve-moe serve` in a process of its own, over flat settings, on an HTTP port of 127.0.0.1."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        port: int,
        host: str = "127.0.0.1",
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.port, self.url = port, f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        self.token = folder / "token"
        self.state = folder / f"rayserve-{os.getuid()}" / str(port)
        self._log = folder / f"log-{port}"
        config = folder / f"{port}.yaml"
        document = serve_config(settings, host=host, port=port)
        if tls is not None:
            document["http_options"] |= {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_TESTS)}
        environment |= {
            "XLA_FLAGS": flags_of_children(),
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "rayserve_moe.cli", "serve", str(config)]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    @property
    def output(self) -> str:
        """All that it has said until now."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def sentences(self) -> list[str]:
        """What the command itself has said."""
        return [line for line in self.output.splitlines() if line.startswith("rayserve-moe serve: ")]

    def wait_until_said(self, text: str) -> None:
        """Wait until the command says something."""
        deadline = time.monotonic() + SERVED_WITHIN_S
        while not any(text in line for line in self.sentences):
            assert self.process.poll() is None, self.output[-5000:]
            assert time.monotonic() < deadline, self.output[-5000:]
            time.sleep(0.1)

    @property
    def ports(self) -> list[int]:
        """All that may be its own: the HTTP port and the block."""
        first = Plan.read(self.state).first_port
        return [self.port, *range(first, first + BLOCK_SIZE)]

    def family(self) -> list[Process]:
        """Every process that it has started and that still runs."""
        return descendants(self.process.pid, all_processes())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(timeout=ENDS_WITHIN_S)

    def close(self) -> None:
        """End it at once, whatever it does."""
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1)


@contextmanager
def started(
    folder: Path,
    settings: dict[str, Any],
    *,
    port: int,
    host: str = "127.0.0.1",
    tls: tuple[Path, Path] | None = None,
) -> Iterator[StartedServer]:
    """Start a server, with a certificate and its key for TLS; it is ended when the block is left."""
    server = StartedServer(folder, settings, port=port, host=host, tls=tls)
    try:
        yield server
    finally:
        server.close()


def serve_config(settings: dict[str, Any], *, host: str, port: int) -> dict[str, Any]:
    """A Serve config of one application."""
    application = {
        "name": "moe",
        "route_prefix": "/",
        "import_path": "rayserve_moe.serving.app:build",
        "args": settings,
    }
    http = {"host": host, "port": port}
    logging = {"enable_access_log": False}
    return {
        "proxy_location": "HeadOnly",
        "http_options": http,
        "logging_config": logging,
        "applications": [application],
    }


def listening_elsewhere(processes: list[Process]) -> dict[str, str]:
    """Return what these processes listen on beyond 127.0.0.1: hexadecimal address and port, title of the process."""
    title_of = {}
    for process in processes:
        for entry in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                title_of[os.readlink(entry)] = process.title
            except OSError:
                continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            title, address = title_of.get(f"socket:[{fields[9]}]"), fields[1].partition(":")[0]
            if fields[3] == "0A" and title and not address.endswith("0100007F"):
                found[fields[1]] = title
    return found
