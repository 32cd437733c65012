"""Launcher of Python workers for the raylet: asks the fork server for a fork, or starts the worker as Ray does.

`write_worker_launcher` writes the script. Ray's own way is taken for a worker with a runtime environment, which may
have other modules, and where the fork server does not answer. Nothing here loads Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rayserve_moe.config.load import inherited_environment
from rayserve_moe.serving.start.fork_server import WorkerCommand
from rayserve_moe.serving.start.state import FORK_SOCKET, WORKER_LAUNCHER

ANSWER_S = 60.0
"""For the fork server to import its modules, and to fork."""
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_PYTHON = "PYTHON"
_OF_SERVE = "RAY_SERVE_INTERNAL_DEPLOYMENT_"
"""Begins the names of variables that Serve gives its actors, and reads when they ask for their context."""


def write_worker_launcher(folder: Path) -> Path:
    """Write the script to a state folder, which only its owner can enter; returns its path."""
    script = folder / WORKER_LAUNCHER
    lines = f"from {__name__} import main\n\nmain({str(folder)!r})\n"
    script.write_text(lines, encoding="utf-8")
    return script


def main(folder: str) -> None:
    """Have the worker of this command line started; returns once it is."""
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
    """Return the variables that a Python worker gets besides those of the raylet; None where it cannot be forked.

    That is any other program, and one whose runtime environment has more than variables of Serve's own.
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
    """Return the path of Ray's own launcher; Ray is not imported for it."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None, "Ray is installed"
    return str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py")
