"""The ports of one deployment: a block of neighbours that no other deployment has, below those the system gives out."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rayserve_moe.serving.start.processes import read_process

BLOCK_SIZE = 100
FIRST_PORT, NUM_BLOCKS = 20_000, 100
_FIRST_REPLICA, _FIRST_GRPC_REPLICA = 20, 60
_LISTENING = "0A"


class StartError(ValueError):
    """What stands in the way of a start, in one line."""


@dataclass(frozen=True)
class Ports:
    """The ports of the block that begins at `first`. Every port but the one of HTTP comes from it."""

    first: int

    @property
    def fallback_http(self) -> int:
        """Serve's proxy behind HAProxy, which answers while no replica does."""
        return self.first

    @property
    def fallback_grpc(self) -> int:
        """The same for gRPC."""
        return self.first + 1

    @property
    def haproxy_metrics(self) -> int:
        """HAProxy's numbers for Prometheus."""
        return self.first + 2

    @property
    def haproxy_statistics(self) -> int:
        """HAProxy's page."""
        return self.first + 3

    @property
    def health(self) -> int:
        """HAProxy's listener for `/health` alone."""
        return self.first + 4

    @property
    def dashboard(self) -> int:
        """Ray's dashboard, where jobs are submitted."""
        return self.first + 5

    @property
    def cluster(self) -> int:
        """Ray's control service."""
        return self.first + 6

    @property
    def client(self) -> int:
        """Ray's service for remote clients."""
        return self.first + 7

    @property
    def grpc(self) -> int:
        """gRPC ingress, where a config has one and names no port."""
        return self.first + 8

    @property
    def replicas(self) -> tuple[int, int]:
        """First and last port where replicas answer HTTP."""
        return self.first + _FIRST_REPLICA, self.first + _FIRST_GRPC_REPLICA - 1

    @property
    def grpc_replicas(self) -> tuple[int, int]:
        """First and last port where replicas answer gRPC."""
        return self.first + _FIRST_GRPC_REPLICA, self.first + BLOCK_SIZE - 1


def choose_ports(http_port: int, *, claimed: Collection[int], is_free: Callable[[int], bool]) -> Ports:
    """Return the first block, from the one that belongs to `http_port` on, that is whole and unclaimed.

    `claimed` are first ports of the blocks of other deployments. StartError when there is none.
    """
    for number in range(NUM_BLOCKS):
        first = FIRST_PORT + (http_port + number) % NUM_BLOCKS * BLOCK_SIZE
        block = range(first, first + BLOCK_SIZE)
        if first not in claimed and http_port not in block and all(map(is_free, block)):
            return Ports(first)
    raise StartError(f"no {BLOCK_SIZE} neighbouring ports are free from {FIRST_PORT} on")


def is_free(port: int, host: str = "") -> bool:
    """Whether nobody listens on a port, on this interface or all. OSError where this user may not listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def owner_of(port: int) -> str:
    """Say who listens on a port, as well as this user can see."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(entry) in inodes and (process := read_process(int(entry.parts[2]))):
                return f"process {process.pid} ({process.title})"
    return "a process of another user"
