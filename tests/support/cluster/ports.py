"""Ports of this machine, for servers that are told theirs before they start."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from rayserve_moe.serving.start.ports import BLOCK_SIZE, Ports, choose_ports, is_free

_RESERVING = BLOCK_SIZE - 1


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reserve_ports() -> tuple[Ports, socket.socket]:
    """A block for what this process starts, and the socket that keeps it from other test processes while it is open."""
    claimed: set[int] = set()
    while True:
        ports = choose_ports(os.getpid(), claimed=claimed, is_free=is_free)
        reservation = socket.socket()
        with suppress(OSError):
            reservation.bind(("", ports.first + _RESERVING))
            return ports, reservation
        reservation.close()
        claimed.add(ports.first)
