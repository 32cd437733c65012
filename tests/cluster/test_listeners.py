"""The ports of a running server against the table of docs/operate/start.md."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from benchmarks.serve_process import ServeProcess
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.listening_ports import EVERY, documented, found, role_of
from tests.support.session.xla_flags import user_flags


@pytest.mark.slow
def test_nothing_listens_that_is_not_documented(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown listener fails, as does one that is reached from elsewhere without protection, and a stale row."""
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", user_flags())
    with tempfile.TemporaryDirectory(prefix="l-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
        with ServeProcess({**SETTINGS, "model_path": str(checkpoint)}) as server:
            running = found(server.pids_of(""))
    assert running == {(row.role, row.interface) for row in documented()}


def test_what_is_reached_from_elsewhere_is_protected() -> None:
    rows = documented()
    assert len(rows) > 10
    assert all(row.purpose and row.protection for row in rows)
    assert {row.protection for row in rows if row.interface == EVERY} == {"Ray's token"}


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:moe:moe-server.check_health", ""], "ServeReplica"),
        (["ray::HostWorker.execute"], "HostWorker"),
        (["/bin/python", "-u", "/x/dashboard.py", "--host=1"], "dashboard.py"),
        (["/bin/python", "-m", "ray.util.client.server", "--port=1"], "ray.util.client.server"),
        (["/x/raylet/raylet", "--static"], "raylet"),
    ],
)
def test_a_process_is_known_by_what_it_calls_itself(command: list[str], role: str) -> None:
    assert role_of(command) == role
