"""A worker that is forked is the one that the raylet asked for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rayserve_moe.serving.start.fork_server import WorkerCommand
from rayserve_moe.serving.start.worker_launcher import is_plain, write_worker_launcher

PLAIN = ["default_worker.py", "--node-id=1", "--language=PYTHON"]


@pytest.mark.parametrize(
    ("more", "plain"),
    [
        ([], True),
        (["--serialized-runtime-env-context={}"], True),
        (['--serialized-runtime-env-context={"env_vars": {}, "command_prefix": []}'], True),
        (['--serialized-runtime-env-context={"env_vars": {"A": "1"}}'], False),
        (['--serialized-runtime-env-context={"py_executable": "/other/python"}'], False),
        (["--serialized-runtime-env-context=nonsense"], False),
    ],
)
def test_a_runtime_environment_takes_the_way_of_ray(more: list[str], plain: bool) -> None:
    assert is_plain([*PLAIN, *more]) == plain


@pytest.mark.parametrize(
    "arguments", [["-m", "ray.util.client.server", "--language=PYTHON"], ["a.py"], ["a.py", "--language=JAVA"]]
)
def test_what_is_no_python_worker_takes_the_way_of_ray(arguments: list[str]) -> None:
    assert not is_plain(arguments)


def test_a_command_arrives_whole_with_the_files_of_its_sender(tmp_path: Path) -> None:
    """As the launcher sends it, in a process of its own."""
    folder = tmp_path / "state"
    folder.mkdir()
    script = write_worker_launcher(folder)
    with socket.socket(socket.AF_UNIX) as listener, (tmp_path / "out").open("wb") as out:
        listener.bind(str(folder / "f"))
        listener.listen()
        listener.settimeout(60)
        received: list[tuple[WorkerCommand, list[int]]] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(WorkerCommand.receive(connection))
                connection.sendall(b"\1")

        serving = threading.Thread(target=serve)
        serving.start()
        environment = {**os.environ, "ONE": "x" * 100_000}
        launched = subprocess.run(
            [sys.executable, script, *PLAIN], cwd=tmp_path, env=environment, stdout=out, timeout=60, check=False
        )
        serving.join()
        ((command, files),) = received
        os.write(files[1], b"of the worker")
        for file in files:
            os.close(file)
    assert launched.returncode == 0
    assert command.arguments == ("default_worker.py", "--node-id=1")
    assert command.environment["ONE"] == environment["ONE"] and command.folder == str(tmp_path)
    assert (tmp_path / "out").read_bytes() == b"of the worker"


def test_without_a_fork_server_the_worker_is_started_as_ray_does(tmp_path: Path) -> None:
    """Ray's own launcher runs the program: an argument that tells it apart comes through."""
    program = tmp_path / "worker.py"
    program.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    folder = tmp_path / "state"
    folder.mkdir()
    script = write_worker_launcher(folder)
    done = subprocess.run(
        [sys.executable, script, program, "--node-id=1", "--language=PYTHON"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == ["--node-id=1"]
