"""The process that Ray's Python workers of a start are forked from: it has imported once what each of them needs.

    python -m rayserve_moe.serving.start.fork_server STATE_FOLDER

    raylet       runs     the worker launcher, in place of Ray's own (`ray_options` says so)
    launcher     sends    a worker's command line, environment, folder and output files, over a socket of the folder
    this process forks    the worker, which runs as if the raylet had started it

The imports would take each of seven workers two to four seconds of a core. Nothing may start a thread before a fork:
modules are imported here, and do nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayserve_moe.config.load import replace_environment
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import FORK_SOCKET, Plan, log_folder, write_check
from rayserve_moe.serving.start.supervisor import NO_JOB, RAY_JOB_ID

IMPORTED = (
    "ray._private.node",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.haproxy",
    "ray.serve._private.replica",
    "rayserve_moe.serving.app",
    "rayserve_moe.cluster.host_worker",
    "rayserve_moe.serving.start.model_check",
)
NUM_FILES = 3
"""Standard input, output and error."""
MOST_WAITING = 128
_LENGTH_BYTES = 4
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class WorkerCommand:
    """A worker as the raylet would have started it: a Python program with its arguments, and where it runs."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str

    def send(self, connection: socket.socket) -> None:
        """Send it with this process's standard files; returns once the worker is forked. OSError where it is not."""
        body = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [len(body).to_bytes(_LENGTH_BYTES, "big")], list(range(NUM_FILES)))
        connection.sendall(body)
        if not connection.recv(1):
            raise ConnectionError("the worker was not forked")

    @classmethod
    def receive(cls, connection: socket.socket) -> tuple[WorkerCommand, list[int]]:
        """Receive one, and the files. OSError where the other end does not send a whole one."""
        head, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, NUM_FILES)
        length = int.from_bytes(head, "big")
        if len(files) != NUM_FILES or not 0 < length < _MOST_BYTES:
            raise ConnectionError("no command of a worker")
        body = b""
        while len(body) < length:
            if not (part := connection.recv(length - len(body))):
                raise ConnectionError("the command of a worker is cut")
            body += part
        fields = json.loads(body)
        return cls(tuple(fields["arguments"]), fields["environment"], fields["folder"]), files


def main() -> None:
    """Import, have a child check the models, then fork workers until the supervisor ends."""
    join_parent()
    folder = Path(sys.argv[1])
    (folder / FORK_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / FORK_SOCKET))
    listener.listen(MOST_WAITING)
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages that all of them share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers are not awaited here
    if not os.fork():
        listener.close()
        _check(folder)
        return
    if random_of_child() == random_of_child():
        sys.stderr.write("Ray's random numbers began before the fork: workers are started one by one\n")
        (folder / FORK_SOCKET).unlink()
        listener.close()
        signal.pause()
    while True:
        connection, _ = listener.accept()
        with connection:
            command = _forked(connection)
        if command is not None:
            break
    listener.close()
    _run(command)


def import_all() -> None:
    """Import the modules of workers. Ray's library draws no random number here: every fork would repeat it."""
    vars(importlib.import_module("ray.actor"))["ActorClassID"] = ClassIds
    for name in IMPORTED:
        importlib.import_module(name)


class ClassIds:
    """Stands for Ray's type of ids of actor classes, which are drawn where a class is defined."""

    @staticmethod
    def from_random() -> object:
        """Return an id from random bytes of the system."""
        kind = importlib.import_module("ray._raylet").ActorClassID
        return kind(os.urandom(kind.size()))


def random_of_child() -> bytes:
    """Return the first random id that Ray's library draws in a fork."""
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, importlib.import_module("ray._raylet").ObjectID.from_random().binary())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return file.read()


def _check(folder: Path) -> None:
    """Write what is wrong with the models of the plan to its folder, empty where nothing is."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fault = f"the model could not be checked: see {log_folder(folder)}"
    try:
        importlib.import_module("rayserve_moe.serving.start.model_check").check_models(Plan.read(folder).config)
        fault = ""
    except ValueError as error:
        fault = str(error)
    finally:
        write_check(folder, fault)


def _forked(connection: socket.socket) -> WorkerCommand | None:
    """Fork a worker; returns its command in it, None in this process."""
    try:
        command, files = WorkerCommand.receive(connection)
    except (OSError, ValueError, KeyError):
        return None
    if os.fork():
        for file in files:
            os.close(file)
        with suppress(OSError):
            connection.sendall(b"\1")
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # the raylet kills the group of a worker that has ended
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    return command


def _run(command: WorkerCommand) -> None:
    """Become the worker."""
    replace_environment({**command.environment, RAY_JOB_ID: NO_JOB})
    os.chdir(command.folder)
    program, *_ = command.arguments
    sys.argv = list(command.arguments)
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
