"""Which TCP ports processes of this machine listen on, and where, read from /proc; and what the documentation says."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
OPERATE = Path(__file__).parents[3] / "docs" / "operate" / "start.md"
LOCAL, EVERY = "127.0.0.1", "every interface"


@dataclass(frozen=True, order=True)
class Listener:
    """A port that a process listens on; `address` is the interface."""

    pid: int
    address: str
    port: int

    @property
    def interface(self) -> str:
        """From where it is reached: LOCAL, EVERY, or an address of this machine."""
        found = ipaddress.ip_address(self.address)
        found = getattr(found, "ipv4_mapped", None) or found
        return LOCAL if found.is_loopback else EVERY if found.is_unspecified else str(found)


@dataclass(frozen=True)
class Documented:
    """A row of the table "What listens": who, for what, on which interface, and what keeps strangers out."""

    role: str
    purpose: str
    interface: str
    protection: str


def documented() -> list[Documented]:
    """The table of docs/operate/start.md."""
    _, _, section = OPERATE.read_text(encoding="utf-8").partition("## What listens\n")
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [Documented(*(cell.strip(" `") for cell in line.strip("|").split("|"))) for line in table[2:]]


def role_of(command: list[str]) -> str:
    """What a process is called in the table: by the title that it gave itself, its module, script or executable."""
    if command[0].startswith("ray::"):
        return command[0].split(" ")[0].removeprefix("ray::").split(":")[0].split(".")[0]
    if "-m" in command:
        return command[command.index("-m") + 1]
    return Path(next((word for word in command if word.endswith(".py")), command[0])).name


def found(pids: Iterable[int]) -> set[tuple[str, str]]:
    """Roles of the processes that listen, with the interface."""
    rows = set()
    for listener in listeners(pids):
        with suppress(OSError):
            command = Path(f"/proc/{listener.pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
            rows.add((role_of(command), listener.interface))
    return rows


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The TCP ports that these processes listen on."""
    sockets = _listening_sockets()
    found = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    name = os.readlink(entry)
                    if name in sockets:
                        found.add(Listener(pid, *sockets[name]))
    return sorted(found)


def _listening_sockets() -> dict[str, tuple[str, int]]:
    sockets = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                sockets[f"socket:[{fields[9]}]"] = _address(address), int(port, 16)
    return sockets


def _address(words: str) -> str:
    """An address as the kernel writes it: words of four bytes, each in the order of this (little-endian) machine."""
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return str(ipaddress.ip_address(raw))
