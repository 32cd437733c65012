"""The server of a run: Ray Serve on this machine, as `rayserve-moe serve` starts it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import yaml

from benchmarks.serve_process import HOST, free_port, is_healthy, serve_config

START_TIMEOUT_S, END_TIMEOUT_S, POLL_S = 300.0, 90.0, 0.2


class GrpoServer:
    """A context manager around a server; `url` is its address. RuntimeError where it does not become healthy.

    Its processes end with this one, however this one ends, and run on the `cores` given. Config and log are
    `serve.yaml` and `server.log`.
    """

    def __init__(self, settings: dict[str, Any], directory: Path, *, cores: Collection[int] = ()) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self._port, self._log_path = port, directory / "server.log"
        config = directory / "serve.yaml"
        config.write_text(yaml.safe_dump(serve_config(settings, port=port)), encoding="utf-8")
        program = Path(sys.executable).parent / "rayserve-moe"
        command = [sys.executable, "-m", "examples.grpo.attached", program, "serve", config]
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        with self._log_path.open("ab") as log:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(self._port):
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                last_words = self._log_path.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"the server did not become healthy:\n{last_words}")
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
