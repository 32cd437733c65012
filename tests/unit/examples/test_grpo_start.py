"""The start of the GRPO command: what is missing is named, and what its server says is passed on, its last line too."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from examples.grpo import __main__ as entry
from examples.grpo import server as grpo_server
from examples.grpo.server import GrpoServer, ServerFailed


def program(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "rayserve-moe"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def test_a_missing_extra_is_one_line_with_its_remedy(monkeypatch):
    found = util.find_spec
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(SystemExit, match=r"^error: matplotlib not installed.*pip install -e '\.\[grpo\]'$"):
        entry.main()


def test_stages_are_said_and_the_last_one_is_why_a_server_ended(tmp_path, capsys):
    lines = ["rayserve-moe serve: starting Ray", "(ServeReplica pid=1) noise", "rayserve-moe serve: no such model"]
    says = program(tmp_path, "\n".join(f"echo '{line}'" for line in lines) + "\nexit 1")
    with pytest.raises(ServerFailed) as failure, GrpoServer({}, tmp_path, program=says):
        pass
    assert str(failure.value) == f"the server ended: no such model (log: {tmp_path / 'server.log'})"
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"grpo: starting the server (log: {tmp_path / 'server.log'})"
    assert "noise" not in "".join(said)


def test_the_limit_is_the_servers_own(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_server, "GRACE_S", 0.0)
    waits = program(tmp_path, "echo 'rayserve-moe serve: loading'\nexec sleep 600")
    with pytest.raises(ServerFailed, match=r"did not start within 1 s: loading \(log: "):
        GrpoServer({"start_timeout_s": 1.0}, tmp_path, program=waits).__enter__()


def test_a_log_that_goes_on_is_read_from_where_this_server_began(tmp_path):
    (tmp_path / "server.log").write_text("rayserve-moe serve: an earlier failure\n")
    silent = program(tmp_path, "exit 1")
    with pytest.raises(ServerFailed, match="ended: it said nothing"):
        GrpoServer({}, tmp_path, program=silent).__enter__()
