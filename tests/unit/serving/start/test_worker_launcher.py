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

from rayserve_moe.serving.start.fork_server import WorkerCommand, added_variables, write_worker_launcher

SERVE_OWN = "RAY_SERVE_INTERNAL_DEPLOYMENT_NAME"
PLAIN = ["default_worker.py", "--node-id=1", "--language=PYTHON"]


@pytest.mark.parametrize(
    ("context", "added"),
    [
        (None, {}),
        ({}, {}),
        ({"env_vars": {}, "command_prefix": [], "py_executable": sys.executable}, {}),
        (
            {"env_vars": {SERVE_OWN: "1"}, "py_executable": sys.executable},
            {SERVE_OWN: "1"},
        ),
        ({"env_vars": {SERVE_OWN: "1", "JAX_PLATFORMS": "tpu"}}, None),
        ({"py_executable": "/other/python"}, None),
        ({"command_prefix": ["cd", "/job"]}, None),
        ([], None),
    ],
)
def test_a_runtime_environment_of_others_takes_the_way_of_ray(context: object, added: dict[str, str] | None) -> None:
    more = [] if context is None else [f"--serialized-runtime-env-context={json.dumps(context)}"]
    assert added_variables([*PLAIN, *more]) == added


@pytest.mark.parametrize(
    "arguments", [["-m", "ray.util.client.server", "--language=PYTHON"], ["a.py"], ["a.py", "--language=JAVA"]]
)
def test_what_is_no_python_worker_takes_the_way_of_ray(arguments: list[str]) -> None:
    assert added_variables(arguments) is None


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


@pytest.mark.slow
def test_forks_draw_random_ids_of_their_own() -> None:
    """Placement groups and tasks have random ids: two workers that share a state would share them."""
    code = (
        "from rayserve_moe.serving.start.fork_server import import_all, random_of_child\n"
        "import_all()\n"
        "assert len({random_of_child() for _ in range(4)}) == 4"
    )
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)
