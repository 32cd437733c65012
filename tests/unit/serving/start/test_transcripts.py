"""Transcripts of the docs that need no server: each command is run in a shell, and shows what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.transcripts import Entry, difference, entries, of_section

PROGRAMS = Path(sys.executable).parent
LIMIT_S = 120


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without variables of Ray, jax or this package."""
    environment = {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path("src").resolve()),
        "HOME": str(folder),
        "COLUMNS": "80",
    }
    asked = {"capture_output": True, "text": True, "timeout": LIMIT_S, "env": environment, "cwd": folder}
    return subprocess.run(["bash", "-c", command], check=False, **asked)


@pytest.mark.parametrize("entry", [*of_section("Errors"), *of_section("Help")], ids=lambda entry: entry.command[:50])
def test_a_command_shows_what_the_page_says(entry, tmp_path):
    done = run(entry.command, tmp_path)
    assert (done.returncode == 0) == ("--help" in entry.command)
    assert not difference(entry, done.stdout + done.stderr, folders={})


def labels(report: str) -> list[str]:
    """Return the sections and names of lines of a report."""
    lines = (line[:20].lstrip("!X ").rstrip() for line in report.splitlines())
    return [line for line in lines if line and line != "..."]


def test_the_doctors_report_has_every_line_of_the_page(tmp_path):
    (entry,) = of_section("Doctor")
    done = run(entry.command, tmp_path)
    found = labels(done.stdout)
    machine = {"port 8000", "this machine can ser"}  # a port may be taken, and then the last line differs
    assert not [label for label in labels(entry.shown) if label not in found and label not in machine]
    assert done.returncode == (0 if "this machine can serve" in done.stdout else 1)


def test_the_page_has_every_transcript():
    sections = {entry.section for entry in entries()}
    assert sections == {"First start", "Ctrl-C", "Second start", "Chat", "Bench", "Errors", "Help", "Doctor"}


@pytest.mark.parametrize(
    ("wanted", "shown", "differs"),
    [
        ("a 1\nb\n", "a 27\nb\n", False),
        ("a\n...\nb\n", "a\nx\ny\nb\n", False),
        ("a\n...\n", "a\nx\n", False),
        ("/tmp/x-1\n", "/home/me/x-2\n", False),
        ("a\nb\n", "a\n", True),
        ("a\n", "a\nb\n", True),
        ("a\nb\n", "a\nx\nb\n", True),
        ("a\n...\nb\n", "a\nx\n", True),
        ("a\n...\nb 1\nc\n", "a\nb 1\nx\nb 2\nc\n", False),
        ("a\n...\nb\n...\nc\n", "a\nc\nb\nc\n", False),
        ("a\n...\nb\n", "a\nb\nc\n", True),
        ("a\n...\nb\n...\n", "a\nc\n", True),
    ],
)
def test_a_transcript_that_differs_is_found(wanted, shown, differs):
    assert bool(difference(Entry("", "", wanted), shown, folders={"/home/me": "/tmp"})) == differs
