"""Transcripts of the docs with a server: two starts, a chat at a terminal, a load, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster.ports import free_port
from tests.support.cluster.start_command import ENDS_WITHIN_S, SERVED_WITHIN_S
from tests.support.docs.transcripts import Entry, difference, of_section
from tests.support.session.xla_flags import flags_of_children

LAST_LINE = "  stop     Ctrl-C"
ANSWERS_WITHIN_S = 120.0

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as those of sockets must have."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as path:
        yield Path(path)


class User:
    """A user with a folder, who types commands of the page for the port of this test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        programs = f"{Path(sys.executable).parent}:{own['PATH']}"
        self.environment = own | {
            "PATH": programs, "RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": flags_of_children(), "COLUMNS": "200",
        }  # fmt: skip

    def command(self, entry: Entry) -> list[str]:
        """Return the words of a command, at this test's port."""
        option = (
            ["--port", str(self.port)] if " serve " in entry.command else ["--url", f"http://127.0.0.1:{self.port}"]
        )
        return [*entry.command.split(), *option]

    def differs(self, entry: Entry, shown: str) -> str:
        return difference(entry, shown, folders={str(self.folder): "/tmp", f"{Path(sys.executable).parent}/": ""})


def wait_for(condition: Callable[[], bool], *, within_s: float, shown: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.1)


def served(user: User, entry: Entry, log: Path, meanwhile: Callable[[], None]) -> tuple[str, str]:
    """Serve, and stop by Ctrl-C after `meanwhile`; returns what was shown until it served, and after the signal."""
    with log.open("wb") as file:
        server = subprocess.Popen(
            user.command(entry), env=user.environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for(
            lambda: server.poll() is not None or LAST_LINE in log.read_text(),
            within_s=SERVED_WITHIN_S,
            shown=log.read_text,
        )
        started = log.read_text()
        meanwhile()
        server.send_signal(signal.SIGINT)
        assert server.wait(ENDS_WITHIN_S) == 0, log.read_text()
        return started, log.read_text()[len(started) :]
    finally:
        while server.poll() is None:
            server.send_signal(signal.SIGTERM)
            time.sleep(1)


def talked(user: User, entry: Entry) -> str:
    """Return what a terminal shows of a chat in which the lines of the page are typed, each after its prompt."""
    typed = [line.removeprefix("> ") for line in entry.shown.splitlines() if line.startswith("> ")]
    terminal, of_child = pty.openpty()
    chat = subprocess.Popen(user.command(entry), env=user.environment, stdin=of_child, stdout=of_child, stderr=of_child)
    os.close(of_child)
    shown, prompts = "", 0
    while True:
        try:
            found = os.read(terminal, 4096).decode()
        except OSError:  # the terminal's other end is closed
            break
        if not found:
            break
        shown += found
        if shown.endswith("> ") and prompts < len(typed):
            os.write(terminal, f"{typed[prompts]}\n".encode())
            prompts += 1
    assert chat.wait(ANSWERS_WITHIN_S) == 0
    os.close(terminal)
    return shown.replace("\r", "").replace("\x1b[?2004h", "").replace("\x1b[?2004l", "")


def test_starts_a_chat_a_load_and_the_end_show_what_the_page_says(folder):
    (first,), (second,), (end,) = map(of_section, ("First start", "Second start", "Ctrl-C"))
    (chat,), (bench,) = map(of_section, ("Chat", "Bench"))
    user = User(folder, free_port())

    def use() -> None:
        assert not user.differs(chat, talked(user, chat))
        done = subprocess.run(user.command(bench), env=user.environment, capture_output=True, text=True, check=True)
        assert not user.differs(bench, done.stderr + done.stdout)

    shown, ended = served(user, first, folder / "first.log", use)
    assert not user.differs(first, shown) and not user.differs(end, ended)
    shown, ended = served(user, second, folder / "second.log", lambda: None)
    assert not user.differs(second, shown) and not user.differs(end, ended)
