"""The ragged exchange, and expert layers upon it, over two processes of two devices each, by gloo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.cluster.ports import free_port
from tests.support.session.xla_flags import flags_of_children

NUM_PROCESSES = 2


@pytest.fixture
def environment() -> dict[str, str]:
    """Without the devices that this test process emulates for itself."""
    return os.environ | {"XLA_FLAGS": flags_of_children()}


@pytest.mark.parametrize(
    ("program", "num_cases"),
    [
        ("kernels.ragged_exchange", ["20"]),
        pytest.param("kernels.ragged_exchange", ["200"], marks=pytest.mark.slow),
        pytest.param("experts.moe_layer", [], marks=pytest.mark.slow),
    ],
)
def test_two_processes_get_what_the_definition_says(program, num_cases, environment):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", f"tests.support.{program}", address]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(NUM_PROCESSES), *num_cases], env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(NUM_PROCESSES)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
