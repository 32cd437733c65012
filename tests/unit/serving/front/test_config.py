"""Our configuration of HAProxy over the servers that the installed Ray lists."""

from __future__ import annotations

import difflib
import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rayserve_moe.serving.front.launcher import UnknownTemplateError, configure, main
from rayserve_moe.serving.front.limits import FrontLimits, answer_files
from rayserve_moe.serving.front.processes import BINARY, Handed
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import ray_config, wait_until_open
from tests.support.serving.ray_fronts import DIRECTORY, SCENARIOS, directives, write_ray_config

LIMITS = FrontLimits(health_port=8001, max_connections=500, max_connections_per_source=300)
RECORDED = Path(__file__).with_name("recorded")
SECTIONS = ("global", "defaults", "frontend", "backend", "listen")
CHANGED = {"gRPC": {"default_backend grpc-moe": "default_backend http-moe"}}
"""Lines of the recorded configurations that are others now: `/health` was sent to a gRPC backend."""


def configured(name: str, directory: Path) -> Path:
    """Have Ray write a configuration, and write ours in its place."""
    config = write_ray_config(directory, SCENARIOS[name])
    configure(config, replace(LIMITS, **SCENARIOS[name].limits), num_files=100_000)
    return config


def text_of(directory: Path, limits: FrontLimits = LIMITS, **changes: object) -> str:
    config = ray_config(directory, **changes)
    configure(config, limits)
    return config.read_text()


def lines_with(text: str, word: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if word in line]


def sections_of(lines: list[str]) -> dict[str, list[str]]:
    """The directives by section; where their order has no meaning, sorted by their names."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.split()[0] in SECTIONS:
            found[line] = []
        else:
            found[list(found)[-1]].append(line)
    for name in ("global", "defaults"):
        found[name].sort(key=lambda line: line.split()[: 2 if line.startswith(("timeout", "option", "errorf")) else 1])
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_ours_has_the_directives_of_rays_own_edited_by_rules(name: str, tmp_path: Path) -> None:
    """The recorded texts are of the time when regular expressions edited what Ray generates."""
    recorded, _, pools = (RECORDED / f"{name.replace(' ', '_').replace(',', '')}.cfg").read_text().partition("\n# ")
    config = configured(name, tmp_path)
    old = sections_of([CHANGED.get(name, {}).get(line, line) for line in directives(recorded)])
    new = sections_of(directives(config.read_text().replace(str(tmp_path), DIRECTORY)))
    assert list(new) == list(old)
    for section, lines in old.items():
        assert not list(difflib.unified_diff(lines, new[section], section, n=0, lineterm=""))
    if pools:
        script = config.with_name("routers.lua").read_text().replace(str(tmp_path), DIRECTORY)
        assert pools.partition("\n")[2].rstrip() in script
    assert config.with_name("routers.lua").exists() == bool(pools)


@pytest.mark.parametrize("name", [name for name, one in SCENARIOS.items() if one.host != "::1"])
def test_haproxy_takes_ours_and_the_standbys(name: str, tmp_path: Path) -> None:
    """An IPv6 host needs brackets, in Ray as here."""
    config, standby = configured(name, tmp_path), tmp_path / "standby.cfg"
    handed = Handed.read(tmp_path)
    standby.write_text(handed.config)
    standby.with_suffix(".lua").write_text(handed.script)
    for text in (config, standby):
        command = [BINARY, "-c", "-f", text]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stats socket ", "stats nothing "),
        ("bind :", "bound "),
        ("bind *:", "bound "),
        ("frontend http_frontend", "frontend other"),
        ("defaults\n", "defaults other\n"),
        ("acl healthcheck ", "acl other "),
        ("acl is_http-moe path", "acl other"),
        ("    timeout client ", "    wait-for client "),
        ("http-reuse always", "http-reuse always\nbackend new\n    server new 127.0.0.1:1"),
    ],
)
def test_a_template_of_ray_that_is_not_known_is_refused(old: str, new: str, tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=(30000,))
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(UnknownTemplateError, match="Ray's HAProxy file"):
        configure(config, LIMITS)


def test_one_that_is_started_again_is_configured_alike(tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=(30000,), routers=(30001,))
    first = configure(config, LIMITS)
    text = config.read_text()
    assert configure(config, LIMITS) == first and config.read_text() == text


def test_the_launcher_refuses_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text("global\n")
    with pytest.raises(SystemExit, match=r"^rayserve-moe: Ray's HAProxy file has no section 'defaults'$"):
        main([json.dumps(asdict(LIMITS)), "-db", "-f", str(config)])
    assert config.read_text() == "global\n"


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "")])
def test_its_own_pages_listen_where_http_does(host: str, interface: str, tmp_path: Path) -> None:
    text = text_of(tmp_path, replicas=(30000,), host=host)
    hosts = [line.removeprefix("bind ").rpartition(":")[0] for line in lines_with(text, "bind ")]
    assert sorted(hosts) == sorted([interface, interface, interface or "*", "127.0.0.1"])


def test_only_the_owner_commands_haproxy(tmp_path: Path) -> None:
    (line,) = lines_with(text_of(tmp_path, replicas=(30000,)), "stats socket")
    assert "mode 600" in line and "level admin" in line


def test_requests_are_never_handed_to_the_proxy_that_holds_them(tmp_path: Path) -> None:
    lines = lines_with(configured("gRPC", tmp_path).read_text(), " backup")
    assert len(lines) == 5 and all(line.endswith("backup disabled") for line in lines)


@pytest.mark.parametrize(("replicas", "retries"), [((30000,), 0), ((30000, 30001), 1)])
def test_a_lost_replica_is_not_asked_again(replicas: tuple[int, ...], retries: int, tmp_path: Path) -> None:
    assert lines_with(text_of(tmp_path, replicas=replicas), "retries") == [f"retries {retries}"]


def test_while_a_standby_serves_one_without_replicas_takes_no_requests(tmp_path: Path) -> None:
    for replicas, takes_requests in (((), False), ((30000,), True)):
        config = ray_config(tmp_path, replicas=replicas)
        handed = configure(config, LIMITS, stands_in=1)
        assert handed.takes_requests == takes_requests == bool(lines_with(config.read_text(), "bind "))
        assert lines_with(handed.config, "bind ")


def test_every_answer_of_its_own_is_an_error_object() -> None:
    for name, answer in answer_files().items():
        head, _, body = answer.partition("\r\n\r\n")
        status = int(head.split()[1])
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert f"Content-Length: {len(body)}" in head
        assert ("Retry-After" in head) == (status == 503), name


@pytest.mark.parametrize("ports", [(), (30000,), (30000, 30001, 30002)])
def test_every_replica_adds_its_connections(ports: tuple[int, ...], tmp_path: Path) -> None:
    text = text_of(tmp_path, port=free_port(), replicas=ports)
    most = max(1, len(ports)) * LIMITS.max_connections
    assert f"    maxconn {most}\n    stick-table" in text
    assert f"sc0_conn_cur gt {max(1, len(ports)) * LIMITS.max_connections_per_source} " in text


@pytest.mark.parametrize("num_files", [1024, 4096])
def test_haproxy_starts_with_as_few_files_as_a_process_may_have(num_files: int, tmp_path: Path) -> None:
    many = replace(LIMITS, max_connections=1_000_000, health_port=free_port())
    few = many.for_replicas(1, num_applications=1, num_files=num_files)
    assert many.for_replicas(1, num_applications=1, num_files=10**9) == many
    assert few.max_connections_per_source <= few.max_connections < num_files // 2
    config = ray_config(tmp_path, port=free_port(), replicas=(30000,))
    configure(config, many, num_files=num_files)
    command = f"ulimit -n {num_files} && exec {BINARY} -db -f {config}"
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(["sh", "-c", command], stderr=log) as haproxy:
        try:
            wait_until_open(few.health_port)
            assert haproxy.poll() is None, (tmp_path / "log").read_text()
        finally:
            haproxy.kill()
