"""The ragged exchange over two processes of two devices each, by gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

NUM_PROCESSES = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def environment() -> dict[str, str]:
    """Without the devices that this test process emulates for itself."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_two_processes_exchange_as_the_numpy_model_says(environment):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.support.ragged_cases", address]
    processes = [
        subprocess.Popen([*command, str(i), str(NUM_PROCESSES)], env=environment, stderr=subprocess.PIPE, text=True)
        for i in range(NUM_PROCESSES)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
