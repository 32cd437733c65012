"""Runs that others disturb are tried again, and a process and its descendants are not others."""

from __future__ import annotations

import os

import pytest

from benchmarks.peers import quiet
from benchmarks.peers.quiet import MAX_TRIES, others_seconds, undisturbed


def reading(*increments: float):
    """The clock of others, which advances in each run by the next increment."""
    values = [0.0]
    for each in increments:
        values += [values[-1] + each, values[-1] + each]
    return iter(values).__next__


def test_a_disturbed_run_is_tried_again_until_one_is_not():
    results = iter(["disturbed", "disturbed", "alone"])
    assert undisturbed(results.__next__, 0.05, seconds=reading(1e6, 1e6, 0.0)) == ("alone", 0.0)


def test_the_least_disturbed_run_counts_where_none_is_alone():
    increments = [1e9] * MAX_TRIES
    increments[2] = 1e3
    result, share = undisturbed(iter(range(MAX_TRIES)).__next__, 0.05, seconds=reading(*increments))
    assert result == 2 and share > 0.05


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """A machine of this process, a grandchild of it, and another process with a name of several words."""
    ticks = {os.getpid(): (1, 30), 900_001: (os.getpid(), 0), 900_002: (900_001, 20), 900_003: (1, 70)}
    for pid, (parent, count) in ticks.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} {'0 ' * 9}{count - 5} 5 0\n")
    (tmp_path / "900004").mkdir()  # has ended while it was looked at
    (tmp_path / "stat").write_text("cpu  90 10 30 5000 7 1 2 40 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(quiet, "PROC", tmp_path)


@pytest.mark.usefixtures("processes")
def test_the_process_and_its_descendants_are_not_others():
    assert others_seconds() == (90 + 10 + 30 + 1 + 2 - 30 - 20) / os.sysconf("SC_CLK_TCK")
