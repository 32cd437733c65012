"""The server of a run: Ray Serve on this machine, as `rayserve-moe serve` starts it."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import yaml

from rayserve_moe.config.settings import ClusterSettings

HOST = "127.0.0.1"
PROGRAM = Path(sys.executable).parent / "rayserve-moe"
END_TIMEOUT_S, POLL_S = 90.0, 0.2
GRACE_S = 60.0
"""Seconds beyond the server's own limit, within which it says why it has not started."""
STAGE = "rayserve-moe serve: "
"""How the lines of the start command begin."""


class ServerFailed(RuntimeError):
    """The server did not start; the message is its own last line, and names the log."""


class GrpoServer:
    """A context manager around a server; `url` is its address. ServerFailed where it does not become healthy.

    Its processes end with this one, however this one ends, and run on the `cores` given. Config and log are
    `serve.yaml` and `server.log`. The stages of its start are said as they come.
    """

    def __init__(
        self, settings: dict[str, Any], directory: Path, *, cores: Collection[int] = (), program: Path = PROGRAM
    ) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self._log_path, self._read_to = directory / "server.log", 0
        self._limit_s = settings.get("start_timeout_s", ClusterSettings().start_timeout_s) + GRACE_S
        config = directory / "serve.yaml"
        config.write_text(yaml.safe_dump(serve_config(settings, port=self._port)), encoding="utf-8")
        command = [sys.executable, "-m", "examples.grpo.attached", str(program), "serve", str(config)]
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        say(f"starting the server (log: {self._log_path})")
        with self._log_path.open("ab") as log:
            self._read_to = log.tell()
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._limit_s
        last = ""
        while not is_healthy(self._port):
            for last in self._new_stages():
                say(last)
            has_ended = self._child.poll() is not None
            if has_ended or time.monotonic() > deadline:
                self.__exit__()
                last = [last, *self._new_stages()][-1]
                how = "the server ended" if has_ended else f"the server did not start within {self._limit_s:.0f} s"
                raise ServerFailed(f"{how}: {last or 'it said nothing'} (log: {self._log_path})")
            time.sleep(POLL_S)
        return self

    def _new_stages(self) -> list[str]:
        """Return what the start command has said since the last call, without its name."""
        with self._log_path.open("rb") as log:
            log.seek(self._read_to)
            written = log.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._read_to += len(whole)
        lines = whole.decode("utf-8", "replace").splitlines()
        return [line.removeprefix(STAGE) for line in lines if line.startswith(STAGE)]

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def say(line: str) -> None:
    """Print a line at once, beside the bar of a run."""
    print(f"grpo: {line}", file=sys.stderr, flush=True)


def serve_config(settings: dict[str, Any], *, port: int) -> dict[str, Any]:
    """The config of one application on this machine."""
    application = {
        "name": "grpo",
        "route_prefix": "/",
        "import_path": "rayserve_moe.serving.app:build",
        "args": settings,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def is_healthy(port: int) -> bool:
    """Whether a server on this machine answers that it is."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
