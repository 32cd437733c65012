"""Ending processes: only those that are ours, and all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rayserve_moe.serving.start.command import end_orphans
from rayserve_moe.serving.start.processes import all_processes, descendants, own_by_path, read_process

ENDS_ALL = """
import os, signal, subprocess, sys
from rayserve_moe.serving.start.processes import adopt_orphans, all_processes, descendants, end
adopt_orphans()
# A child that leaves a grandchild behind in a session of its own, deaf to SIGTERM.
deaf = "trap '' TERM; echo ready; sleep 1000 & wait; sleep 1000"
child = subprocess.Popen(["setsid", "sh", "-c", f"sh -c \\"{deaf}\\" & sleep 1000"], stdout=subprocess.PIPE)
child.stdout.readline()
child.kill()
family = lambda: descendants(os.getpid(), all_processes())
assert len(family()) >= 2, family()
assert end(family, first=signal.SIGTERM, grace_s=0.2) == []
assert family() == []
"""


def test_orphans_are_adopted_and_ended_even_if_they_are_deaf():
    done = subprocess.run([sys.executable, "-c", ENDS_ALL], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("handling", "stops"), [("default", "True"), ("ignore", "False")])
def test_a_terminal_that_closes_stops_a_server_unless_it_is_told_not_to(handling, stops):
    """Its signal would otherwise end the parent of all processes at once, and what runs with it."""
    asked = "import signal; from rayserve_moe.serving.start import processes; print(signal.SIGHUP in processes.AWAITED)"
    command = ["env", f"--{handling}-signal=HUP", sys.executable, "-c", asked]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout.split() == [stops]


@pytest.fixture
def sleeper(tmp_path):
    """A process that works with a file of the folder, as an orphaned HAProxy does."""
    (tmp_path / "8000").mkdir()
    config = tmp_path / "8000" / "haproxy.cfg"
    config.write_text("import time\nprint('ready', flush=True)\ntime.sleep(1000)")
    with subprocess.Popen([sys.executable, str(config)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_only_an_own_orphan_is_ended(tmp_path, sleeper):
    found = all_processes().values()
    assert [p.pid for p in own_by_path(tmp_path / "8000", found, user=os.getuid())] == [sleeper.pid]
    assert own_by_path(tmp_path / "8000", found, user=os.getuid() + 1) == []
    assert own_by_path(tmp_path / "800", found, user=os.getuid()) == []
    end_orphans(tmp_path / "8001")
    assert sleeper.poll() is None
    end_orphans(tmp_path / "8000")
    reaped = 0  # what is left to say of a child whose end `end_orphans` has collected
    assert sleeper.wait(timeout=60) in (-signal.SIGTERM, reaped)


def test_a_process_is_read_with_its_parent_and_its_end(sleeper):
    process = read_process(sleeper.pid)
    assert process is not None and process.parent == os.getpid() and not process.has_ended
    assert process in descendants(os.getpid(), all_processes())
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    ended = read_process(sleeper.pid)
    assert ended is not None and ended.has_ended and ended.started == process.started
