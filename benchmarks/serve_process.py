"""A Ray Serve application in processes of its own, and the CPU seconds that each of its parts has used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import yaml

from examples.grpo.server import free_port, is_healthy
from rayserve_moe.serving.start.command import DEFAULTS

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
ENVIRONMENT = {**DEFAULTS, "RAY_AUTH_MODE": "disabled"}
"""Of a cluster that applications of benchmarks join; what is set already wins."""
PARTS_BY_TITLE = {"ray::ProxyActor": "proxy", "ray::ServeReplica": "replica", "ray::HostWorker": "host_worker"}
REST = "ray_daemons"
AGENT = "ray::DashboardAgent"
"""Every raylet starts one, once it has joined."""


class ServeProcess:
    """A context manager around a server with the flat `settings`; inside it, the application is healthy.

    It has a Ray cluster of its own, from the start command, or joins that at `ray_address`, which has to have been
    started under `ENVIRONMENT` too. Its own one may have other `nodes`, each with so many CPUs. RuntimeError where it
    ends, or is not healthy in time.
    """

    def __init__(self, settings: dict[str, Any], *, ray_address: str = "local", nodes: Sequence[int] = ()) -> None:
        self.port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="serve-"))
        config = self._directory / "serve.yaml"
        config.write_text(yaml.safe_dump(serve_config(settings, port=self.port)), encoding="utf-8")
        self._log = (self._directory / "log").open("wb")
        programs = Path(sys.executable).parent
        environment: dict[str, str] = dict(os.environ)
        if ray_address == "local":
            command = [programs / "rayserve-moe", "serve", config]
            environment.pop("RAY_ADDRESS", None)
        else:
            command = [programs / "serve", "run", config]
            environment = {**ENVIRONMENT, **environment, "RAY_ADDRESS": ray_address}
        self._child = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._wanted_nodes = nodes

    def add_node(self, *, num_cpus: int) -> None:
        """Start another raylet of this server's own cluster, on this machine. It ends with the server."""
        (head,) = self.pids_of("gcs_server")
        words = Path(f"/proc/{head}/cmdline").read_text(encoding="utf-8").split("\0")
        port = next(word.partition("=")[2] for word in words if word.startswith("--gcs_server_port="))
        pairs = Path(f"/proc/{head}/environ").read_text(encoding="utf-8").rstrip("\0").split("\0")
        environment = dict(pair.split("=", 1) for pair in pairs)
        environment.pop("RAY_OVERRIDE_RESOURCES", None)  # of the head alone
        command = [sys.executable, "-m", "benchmarks.own_node", f"{HOST}:{port}", str(num_cpus)]
        node = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._nodes.append(node)

    def pids_by_node(self, title: str) -> list[list[int]]:
        """Return the processes as `pids_of`, for each added node that runs."""
        return [pids_under(node.pid, title) for node in self._nodes if node.poll() is None]

    def cpu_seconds(self) -> dict[str, float]:
        """Return CPU seconds since the start: proxy, replica (engine and HTTP edge), host worker, Ray's own daemons."""
        return cpu_seconds_by_part(_processes(), self._child.pid)

    def pids_of(self, title: str) -> list[int]:
        """Return this server's processes, on all nodes, whose title, or the name of whose executable, begins so."""
        return sorted([*pids_under(self._child.pid, title), *chain(*self.pids_by_node(title))])

    def __enter__(self) -> Self:
        try:
            self._wait(lambda: not self._wanted_nodes or self.pids_of("gcs_server"), "have a cluster")
            for num_cpus in self._wanted_nodes:
                self.add_node(num_cpus=num_cpus)
                self._wait(
                    lambda: pids_under(self._nodes[-1].pid, AGENT), "get another node"
                )  # one starts faster alone
            self._wait(lambda: is_healthy(self.port), "become healthy")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for node in self._nodes:
            for pid in pids_under(node.pid):
                os.kill(pid, signal.SIGKILL)
            node.wait()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait(self, is_there: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_there():
            if self._child.poll() is not None or time.monotonic() > deadline:
                last_words = (self._directory / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"the application did not {what}:\n{last_words}")
            time.sleep(0.2)


def serve_config(settings: dict[str, Any], *, port: int) -> dict[str, Any]:
    """Return the Serve config of one application on this machine."""
    application = {
        "name": "bench",
        "route_prefix": "/",
        "import_path": "rayserve_moe.serving.app:build",
        "args": settings,
    }
    options = {"host": HOST, "port": port}
    return {
        "proxy_location": "HeadOnly",
        "http_options": options,
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }


def pids_under(root: int, title: str = "") -> list[int]:
    """Return `root` and its descendants whose title, or whose executable's name, begins so."""
    processes = _processes()
    return sorted(
        pid
        for pid in _family(processes, root)
        if processes[pid][1].startswith(title)
        or Path(processes[pid][1].split(" ")[0]).name.startswith(title)
        or f" -m {title}" in processes[pid][1]
    )


def cpu_seconds_by_part(processes: dict[int, tuple[int, str, float]], root: int) -> dict[str, float]:
    """Add up the CPU seconds of `root`'s descendants, itself included, by what their titles say that they are.

    `processes` maps a process id to its parent's, its title and its CPU seconds.
    """
    seconds: dict[str, float] = dict.fromkeys((*PARTS_BY_TITLE.values(), REST), 0.0)
    for pid in _family(processes, root):
        _, title, spent = processes[pid]
        part = next((part for start, part in PARTS_BY_TITLE.items() if title.startswith(start)), REST)
        seconds[part] += spent
    return seconds


def _family(processes: dict[int, tuple[int, str, float]], root: int) -> list[int]:
    """Return `root` and its descendants among `processes`."""
    children = defaultdict(list)
    for pid, (parent, _, _) in processes.items():
        children[parent].append(pid)
    family = [root]
    for pid in family:
        family += children[pid]
    return [pid for pid in family if pid in processes]


def _processes() -> dict[int, tuple[int, str, float]]:
    ticks = os.sysconf("SC_CLK_TCK")
    processes = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            fields = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        processes[int(directory.name)] = (int(fields[1]), title, (int(fields[11]) + int(fields[12])) / ticks)
    return processes
