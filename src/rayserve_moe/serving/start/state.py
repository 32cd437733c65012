"""Files of a start, shared by its processes and the next start, in a folder that only its owner can enter.

    <Ray's temporary folder>/rayserve-<user id>/      lock
        <HTTP port>/       plan.json, launchers of HAProxy and of workers, sockets, and HAProxy's own files
        logs-<HTTP port>/  output of Ray and of the last start's processes, with a link to Ray's own logs

A user and an HTTP port identify a deployment. Processes of a folder whose start has ended may be ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
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
"""Import path of our applications."""
_PLAN = "plan.json"
PROGRESS = "progress"
"""File of progress reports for the console (see `observability.progress`)."""
DEPLOYED = "deployed"
"""Exists once the config has been deployed."""
FORK_SOCKET, WORKER_LAUNCHER, CHECK = "f", "worker.py", "model-check"
"""Socket of the fork server, launcher of workers, and result of the model check."""
MAX_PATH_LENGTH = 37
"""Maximum path length: HAProxy's sockets are below a node's id (56 characters), and may have 97 characters."""


@dataclass(frozen=True)
class Plan:
    """Plan of a start: the deployed Serve config, the start command's process (see `Process`), and ports."""

    pid: int
    """Id of the start command's process."""
    started: int
    """Start time of that process."""
    first_port: int
    config: dict[str, Any]
    url: str
    drain_timeout_s: float
    start_timeout_s: float
    begun: float = 0.0
    """Start time of the command, in seconds since the epoch."""
    journal_max_bytes: int = 0
    """Maximum memory of the journal; 0 for no journal."""
    resume_ttl_s: float = 0.0

    @property
    def ports(self) -> Ports:
        """Return the deployment's own ports."""
        return Ports(self.first_port)

    @property
    def owner(self) -> Process | None:
        """Return the start command's process, or None once it has ended."""
        process = read_process(self.pid)
        is_it = process is not None and process.started == self.started and not process.has_ended
        return process if is_it else None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the plan of a state folder.

        Raises: OSError or ValueError if it is missing or unreadable.
        """
        try:
            return cls(**json.loads((folder / _PLAN).read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"{folder / _PLAN}: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the plan to a state folder atomically."""
        _write_whole(folder / _PLAN, json.dumps(asdict(self)))


def log_folder(folder: Path) -> Path:
    """Return the folder of a deployment's logs, which stays until the next start."""
    return folder.with_name(f"logs-{folder.name}")


def write_check(folder: Path, fault: str) -> None:
    """Write the reason why the models of a plan cannot be served; empty if they can."""
    _write_whole(folder / CHECK, fault)


def read_check(folder: Path) -> str | None:
    """Return the result of `write_check`, or None before it."""
    try:
        return (folder / CHECK).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def private_folder(path: Path) -> Path:
    """Create a folder, unless it exists, that only this user can enter.

    Raises: StartError if another user can enter it.
    """
    if len(str(path)) > MAX_PATH_LENGTH:
        raise StartError(f"{path} is too long for sockets below it: set RAY_TMPDIR to a shorter folder, such as /tmp")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartError(f"{path} must be a folder of yours that no other user can enter (mode 700)")
    return path


@contextmanager
def locked(root: Path) -> Generator[None]:
    """Hold the lock for the choice of ports."""
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(folder: Path) -> None:
    """Remove a state folder under the lock, because the next start uses the same path."""
    with suppress(OSError), locked(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def running_plans(root: Path) -> dict[Path, Plan]:
    """Return the plans of all running starts of this user, by folder."""
    plans = {}
    for folder in root.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            plans[folder] = Plan.read(folder)
    return {folder: plan for folder, plan in plans.items() if plan.owner is not None}


def ensure_token(path: Path) -> None:
    """Create the token by which Ray's processes and clients authenticate, unless it exists; mode 600.

    Raises: StartError if the file belongs to another user or is empty: Ray would start without protection.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    if not path.exists():
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # another start may have created it meanwhile: then that token is used
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    if path.stat().st_uid != os.getuid():
        raise StartError(f"{path}: the token of Ray belongs to another user")
    path.chmod(0o600)
    if not path.read_text(encoding="utf-8").strip():
        raise StartError(f"{path}: the token of Ray is empty; remove the file, and one is made")
