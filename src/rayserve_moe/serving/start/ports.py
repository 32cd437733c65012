"""Ports of a deployment: an exclusive block of neighbours, below the system's ephemeral range."""

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
_LISTENING = "0A"


class StartError(ValueError):
    """Error for a refused start, in a single line."""


def _port(offset: int) -> property:
    return property(lambda ports: ports.first + offset)


def _range(offset: int, end: int) -> property:
    """Return a property with the first and last port of `[offset, end)`."""
    return property(lambda ports: (ports.first + offset, ports.first + end - 1))


@dataclass(frozen=True)
class Ports:
    """Ports of the block that begins at `first`. Every port except HTTP's is in it."""

    first: int

    fallback_http = _port(0)
    """Serve's proxy behind HAProxy, which answers if no replica does."""
    fallback_grpc = _port(1)
    haproxy_metrics = _port(2)
    haproxy_statistics = _port(3)
    health = _port(4)
    """HAProxy's listener for `/health` only."""
    dashboard = _port(5)
    """Ray's dashboard, which accepts jobs."""
    cluster = _port(6)
    """Ray's control service."""
    grpc = _port(8)
    """gRPC ingress, for a config without its port."""
    journal = _port(9)
    """Journal of requests."""
    replicas = _range(20, 60)
    """HTTP ports of replicas."""
    grpc_replicas = _range(60, BLOCK_SIZE)


def choose_ports(http_port: int, *, claimed: Collection[int], is_free: Callable[[int], bool]) -> Ports:
    """Return the first free and unclaimed block, beginning with the block of `http_port`.

    `claimed` are the first ports of other deployments' blocks.

    Raises: StartError if no block is free.
    """
    for number in range(NUM_BLOCKS):
        first = FIRST_PORT + (http_port + number) % NUM_BLOCKS * BLOCK_SIZE
        block = range(first, first + BLOCK_SIZE)
        if first not in claimed and http_port not in block and all(map(is_free, block)):
            return Ports(first)
    raise StartError(f"no {BLOCK_SIZE} neighbouring ports are free from {FIRST_PORT} on")


def is_free(port: int, host: str = "") -> bool:
    """Return True if a port is free on an interface, or on all.

    Raises: OSError if this user may not bind it.
    """
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
    """Return a description of the process that listens on a port, as visible to this user."""
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
