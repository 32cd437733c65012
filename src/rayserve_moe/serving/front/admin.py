"""Admin socket of HAProxy: identifies the running process."""

from __future__ import annotations

import re
import socket
from pathlib import Path

ANSWER_S = 1.0
_PID = re.compile(r"^Pid: (\d+)$", re.MULTILINE)
_STOPPING = re.compile(r"^Stopping: 1$", re.MULTILINE)


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
