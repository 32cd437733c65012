"""Process from which Ray's Python workers of a start are forked, and the launcher of workers that calls it.

    python -m rayserve_moe.serving.start.fork_server STATE_FOLDER

    raylet       runs     the worker launcher, in place of Ray's own (`ray_options` configures it)
    launcher     sends    a worker's command line, environment, folder and output files, over a socket in the folder
    this process forks    the worker, which runs as if the raylet had started it

The process imports the workers' modules once, which would take each of seven workers two to four seconds of a core. No
thread may start before a fork, so the modules are only imported. The launcher does not import Ray. It falls back to
Ray's own launcher for a worker with a runtime environment, which may have other modules, and if this process does not
answer.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rayserve_moe.config.load import inherited_environment, replace_environment
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import FORK_SOCKET, WORKER_LAUNCHER, Plan, log_folder, write_check
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
MAX_WAITING = 128
_LENGTH_BYTES = 4
_MAX_BYTES = 8 << 20
ANSWER_S = 60.0
"""Timeout for the fork server to import its modules, and to fork."""
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_PYTHON = "PYTHON"
_OF_SERVE = "RAY_SERVE_INTERNAL_DEPLOYMENT_"
"""Prefix of variables that Serve sets for its actors, which read them when they request their context."""


@dataclass(frozen=True)
class WorkerCommand:
    """Python worker as the raylet would have started it: program with arguments, environment and folder."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str

    def send(self, connection: socket.socket) -> None:
        """Send the command with this process's standard files and wait until the worker is forked.

        Raises: OSError if it is not forked.
        """
        body = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [len(body).to_bytes(_LENGTH_BYTES, "big")], list(range(NUM_FILES)))
        connection.sendall(body)
        if not connection.recv(1):
            raise ConnectionError("the worker was not forked")

    @classmethod
    def receive(cls, connection: socket.socket) -> tuple[WorkerCommand, list[int]]:
        """Receive a command and its files.

        Raises: OSError if the message is incomplete.
        """
        head, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, NUM_FILES)
        length = int.from_bytes(head, "big")
        if len(files) != NUM_FILES or not 0 < length < _MAX_BYTES:
            raise ConnectionError("no command of a worker")
        body = b""
        while len(body) < length:
            if not (part := connection.recv(length - len(body))):
                raise ConnectionError("the command of a worker is cut")
            body += part
        fields = json.loads(body)
        return cls(tuple(fields["arguments"]), fields["environment"], fields["folder"]), files


def main() -> None:
    """Import modules, check the models in a child, then fork workers until the supervisor ends."""
    join_parent()
    folder = Path(sys.argv[1])
    (folder / FORK_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / FORK_SOCKET))
    listener.listen(MAX_WAITING)
    import_all()
    gc.collect()
    gc.freeze()  # garbage collection in a worker would copy shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended workers automatically
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
    """Import the modules of workers. Ray must not draw random numbers meanwhile, since every fork would repeat them."""
    vars(importlib.import_module("ray.actor"))["ActorClassID"] = ClassIds
    for name in IMPORTED:
        importlib.import_module(name)


class ClassIds:
    """Replacement of Ray's type of actor class ids, which are drawn when a class is defined."""

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
    """Write the fault of the plan's models to its folder; empty if none."""
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
    """Fork a worker; return its command in the child and None in this process."""
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
    os.setpgid(0, 0)  # the raylet kills the process group of an ended worker
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    return command


def _run(command: WorkerCommand) -> None:
    """Run the worker's program in this process."""
    replace_environment({**command.environment, RAY_JOB_ID: NO_JOB})
    os.chdir(command.folder)
    program, *_ = command.arguments
    sys.argv = list(command.arguments)
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def write_worker_launcher(folder: Path) -> Path:
    """Write the launcher script to a state folder, which only its owner can enter; return its path."""
    script = folder / WORKER_LAUNCHER
    lines = f"from {__name__} import launch\n\nlaunch({str(folder)!r})\n"
    script.write_text(lines, encoding="utf-8")
    return script


def launch(folder: str) -> None:
    """Start the worker of this command line through the fork server, or by Ray's own launcher."""
    arguments = sys.argv[1:]
    added = added_variables(arguments)
    if added is not None:
        own = (_CONTEXT, _LANGUAGE)
        command = tuple(argument for argument in arguments if not argument.startswith(own))
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(Path(folder, FORK_SOCKET)))
            WorkerCommand(command, {**inherited_environment(), **added}, os.getcwd()).send(connection)
            return
    os.execv(sys.executable, [sys.executable, _own_launcher(), *arguments])


def added_variables(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the variables that a Python worker gets besides the raylet's; None if it cannot be forked.

    Other programs cannot be forked, nor can workers whose runtime environment has more than Serve's own variables.
    """
    languages = [one.removeprefix(_LANGUAGE) for one in arguments if one.startswith(_LANGUAGE)]
    if languages != [_PYTHON] or not arguments[0].endswith(".py"):
        return None
    try:
        contexts = [json.loads(one.removeprefix(_CONTEXT) or "{}") for one in arguments if one.startswith(_CONTEXT)]
        context = {name: value for each in contexts for name, value in each.items() if value}
        variables = dict(context.pop("env_vars", {}))
    except (ValueError, AttributeError, TypeError):
        return None
    if context.pop("py_executable", sys.executable) != sys.executable or context:
        return None
    return variables if all(name.startswith(_OF_SERVE) for name in variables) else None


def _own_launcher() -> str:
    """Return the path of Ray's own launcher, without importing Ray."""
    found = find_spec("ray")
    assert found is not None and found.origin is not None, "Ray is installed"
    return str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py")


if __name__ == "__main__":
    main()
