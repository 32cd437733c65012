"""State folder and token: what nobody else can enter or read."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from rayserve_moe.serving.start.command import DEFAULTS, environment_of, token_path
from rayserve_moe.serving.start.ports import Ports, StartError
from rayserve_moe.serving.start.processes import read_process
from rayserve_moe.serving.start.state import Plan, ensure_token, locked, private_folder, remove, running_plans


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as path:
        yield Path(path)


def plan(*, pid: int, started: int) -> Plan:
    return Plan(pid, started, 20_000, {"applications": []}, "http://127.0.0.1:8000", 1.0, 2.0)


def test_a_folder_that_others_could_enter_is_refused(short):
    path = private_folder(short / "a")
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_folder(path) == path
    path.chmod(0o750)
    with pytest.raises(StartError, match="no other user can enter"):
        private_folder(path)
    (short / "link").symlink_to(short)
    with pytest.raises(StartError, match="no other user can enter"):
        private_folder(short / "link")
    with pytest.raises(StartError, match="set RAY_TMPDIR"):
        private_folder(short / ("b" * 40))


def test_a_plan_is_known_as_running_by_its_process_and_the_time_of_its_start(short):
    this = read_process(os.getpid())
    assert this is not None
    for number, one in {8000: plan(pid=this.pid, started=this.started), 8001: plan(pid=this.pid, started=1)}.items():
        one.write(private_folder(short / str(number)))
    (private_folder(short / "8002") / "plan.json").write_text("{}")
    assert list(running_plans(short)) == [short / "8000"]


def test_a_folder_is_not_removed_while_another_start_looks_at_it(short):
    folder = private_folder(short / "8000")
    plan(pid=1, started=1).write(folder)
    removal = threading.Thread(target=remove, args=[folder])
    with locked(short):
        removal.start()
        while removal.is_alive() and not waits_for_a_lock():
            continue
        assert Plan.read(folder).started == 1
    removal.join()
    assert [entry.name for entry in short.iterdir()] == ["lock"]


def waits_for_a_lock() -> bool:
    """Whether a thread of this process does."""
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(str(os.getpid()) in words for words in waiting)


def test_the_token_is_made_once_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "ray" / "token"
    ensure_token(path)
    token = path.read_text()
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    ensure_token(path)
    assert path.read_text() == token and path.stat().st_mode & 0o777 == 0o600
    path.write_text("\n")
    with pytest.raises(StartError, match="is empty"):
        ensure_token(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_auth_is_by_token_on_loopback_and_no_port_is_left_to_rays_defaults():
    found = environment_of(Ports(20_000), {"HOME": "/h"}, folder=Path("/f"), jax_platforms="cpu", max_answer_s=90.5)
    assert found["RAY_AUTH_MODE"] == "token" and found["HOME"] == "/h" and found["JAX_PLATFORMS"] == "cpu"
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    ports = [int(value) for name, value in found.items() if name.startswith("RAY_SERVE") and name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 8 and all(20_000 <= port < 20_100 for port in ports)
    assert found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "91"
    assert {**DEFAULTS, **found} == found


def test_what_the_user_sets_wins_but_for_ports_and_interfaces():
    given = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "JAX_PLATFORMS": "tpu"}
    found = environment_of(Ports(20_000), given, folder=Path("/f"), jax_platforms="cpu", max_answer_s=90.5)
    assert found["JAX_PLATFORMS"] == "tpu"
    assert found["RAY_SERVE_HAPROXY_STATS_PORT"] == "20003" and found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_what_is_set_to_nothing_does_not_switch_tokens_off(name):
    """Ray reads an empty mode as no protection."""
    given = {name: ""}
    assert token_path(given, Path("/h")) == Path("/h/.ray/auth_token")
    found = environment_of(Ports(20_000), given, folder=Path("/f"), jax_platforms="cpu", max_answer_s=90.5)
    assert found["RAY_AUTH_MODE"] == "token" and found.get(name) != ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Path("/h/.ray/auth_token")),
        ({"RAY_AUTH_TOKEN_PATH": "/t"}, Path("/t")),
        ({"RAY_AUTH_TOKEN": "x"}, None),
    ],
)
def test_the_token_lies_where_ray_looks_for_it(given, expected):
    assert token_path(given, Path("/h")) == expected
