"""Ports of this machine, for servers that are told theirs before they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
