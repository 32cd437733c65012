"""A process ends with the raylet that has started it, and with no other parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 60.0
CHILD = """
from rayserve_moe.cluster.raylet_watch import end_with_raylet
end_with_raylet()
print("ready", flush=True)
input()
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("name", "ends"), [("raylet", True), ("another", False)])
def test_a_worker_ends_with_its_raylet_alone(name: str, ends: bool, tmp_path: Path) -> None:
    """Its standard input stays open: nothing else ends it."""
    program = tmp_path / name
    program.symlink_to(sys.executable)
    reads, writes = os.pipe()
    parent_code = PARENT.replace("stdin=subprocess.PIPE", f"stdin={reads}")
    command = [program, "-c", parent_code.replace("sys.executable", repr(sys.executable))]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (reads,)}
    with subprocess.Popen(command, **streams) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    poll = select.poll()
    poll.register(child, select.POLLIN)
    try:
        assert bool(poll.poll(1000 * (WITHIN_S if ends else 0.5))) == ends
    finally:
        for descriptor in (writes, reads):
            os.close(descriptor)
        assert poll.poll(1000 * WITHIN_S), "it ends with its input"
        os.close(child)
