"""What a start leaves on disk, for its own processes and for the next start: a folder that only its owner can enter.

    <Ray's temporary folder>/rayserve-<user id>/      lock
        <HTTP port>/       plan.json, haproxy (what starts HAProxy), and HAProxy's own files

A deployment is known by its user and its HTTP port. Whoever finds a folder whose start has ended may end what is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rayserve_moe.serving.start.ports import Ports, StartError
from rayserve_moe.serving.start.processes import Process, read_process

APPLICATION = "rayserve_moe.serving.app:build"
"""Import path of the applications that are ours."""
_PLAN = "plan.json"
_LONGEST_PATH = 37
"""HAProxy's sockets lie a node's id (56) below, and may have 97 characters."""


@dataclass(frozen=True)
class Plan:
    """What is started: the Serve config as it is deployed, and by which process on which ports.

    `pid` and `started` (see `Process`) name the process of the start command.
    """

    pid: int
    started: int
    first_port: int
    config: dict[str, Any]
    url: str
    drain_timeout_s: float
    start_timeout_s: float

    @property
    def ports(self) -> Ports:
        """The deployment's own ports."""
        return Ports(self.first_port)

    @property
    def owner(self) -> Process | None:
        """The start command's process; None once it has ended."""
        process = read_process(self.pid)
        is_it = process is not None and process.started == self.started and not process.has_ended
        return process if is_it else None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the plan of a state folder; OSError or ValueError where there is none that can be read."""
        try:
            return cls(**json.loads((folder / _PLAN).read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"{folder / _PLAN}: {error}") from error

    def write(self, folder: Path) -> None:
        """Write it to a state folder, whole or not at all."""
        draft = folder / f"{_PLAN}.part"
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(folder / _PLAN)


def private_folder(path: Path) -> Path:
    """Make a folder, if it is not there, that nobody but this user can enter. StartError where somebody else could."""
    if len(str(path)) > _LONGEST_PATH:
        raise StartError(f"{path} is too long for sockets below it: set RAY_TMPDIR to a shorter folder, such as /tmp")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartError(f"{path} must be a folder of yours that nobody else can enter (mode 700)")
    return path


@contextmanager
def locked(root: Path) -> Generator[None]:
    """Hold the lock under which starts choose their ports."""
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(folder: Path) -> None:
    """Remove a state folder, whole or not at all for a start that looks at it: the next one takes the same."""
    with suppress(OSError), locked(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)


def running_plans(root: Path) -> dict[Path, Plan]:
    """Return the plans of all starts of this user whose process still runs, by folder."""
    plans = {}
    for folder in root.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            plans[folder] = Plan.read(folder)
    return {folder: plan for folder, plan in plans.items() if plan.owner is not None}
