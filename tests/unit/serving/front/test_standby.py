"""A HAProxy that serves while Ray starts another: from a kill on, until the next one has replicas."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rayserve_moe.serving.front.launcher import configure, taking_over
from rayserve_moe.serving.front.processes import ADMIN_SOCKET, STANDBY_SOCKET, Handed, running_pid
from rayserve_moe.serving.front.standby import LOOK_S, Standby, answering
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import (
    front_limits,
    ray_config,
    running_haproxy,
    running_replica,
    wait_until_open,
)

DEADLINE_S, POLL_S = 60.0, 0.02


def until(found: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(POLL_S)


@contextmanager
def looking(config: Path) -> Iterator[Standby]:
    """A standby that looks, as its process does."""
    over, standby = threading.Event(), Standby(config)

    def look() -> None:
        while not over.is_set():
            with suppress(OSError):
                standby.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield standby
    finally:
        over.set()
        thread.join()
        for process in standby.processes:
            process.kill()
            process.wait()


def lose(haproxy: subprocess.Popen[bytes]) -> None:
    haproxy.kill()
    haproxy.wait()  # it answers until then


def is_served(port: int) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=DEADLINE_S).text == "ab"
    return False


def test_a_killed_haproxy_is_stood_in_for_until_the_next_has_replicas(tmp_path: Path) -> None:
    """As Ray does it: one without replicas first, then one that replaces that."""
    admin, own = tmp_path / ADMIN_SOCKET, tmp_path / STANDBY_SOCKET
    port, limits = free_port(), front_limits(free_port())
    with ExitStack() as stack:
        replica = stack.enter_context(running_replica())
        served = {"port": port, "replicas": (replica.server_port,)}
        first = stack.enter_context(running_haproxy(ray_config(tmp_path, **served), limits))
        wait_until_open(port)
        looks = stack.enter_context(looking(tmp_path / "haproxy.cfg"))
        until(lambda: looks.served)
        lose(first)
        until(lambda: is_served(port))
        standby = running_pid(own)
        assert standby is not None and running_pid(admin) is None
        second = stack.enter_context(running_haproxy(ray_config(tmp_path, port=port), limits, "-dR"))
        until(lambda: running_pid(admin) == second.pid)
        for _ in range(20):
            assert_served(port)
        assert running_pid(own) == standby
        threads = stack.enter_context(ThreadPoolExecutor(1))
        slow = threads.submit(httpx.get, f"http://127.0.0.1:{port}/2", timeout=DEADLINE_S)
        time.sleep(0.5)
        arguments = ("-dR", "-sf", str(second.pid), "-x", str(admin))
        third = stack.enter_context(running_haproxy(ray_config(tmp_path, **served), limits, *arguments))
        until(lambda: running_pid(admin) == third.pid and running_pid(own) is None, lambda: assert_served(port))
        assert slow.result().text == "ab", "a stream was cut"
        until(lambda: not Path(f"/proc/{standby}").exists() or _has_ended(standby))
        assert is_served(port)


def assert_served(port: int) -> None:
    assert is_served(port), "a request was refused"


def _has_ended(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_one_that_still_ends_its_answers_does_not_keep_the_next_from_serving(tmp_path: Path) -> None:
    """The one that took over is killed while a stream goes through the standby before it."""
    port, limits = free_port(), front_limits(free_port())
    with ExitStack() as stack:
        replica = stack.enter_context(running_replica())
        config = ray_config(tmp_path, port=port, replicas=(replica.server_port,))
        first = stack.enter_context(running_haproxy(config, limits))
        looks = stack.enter_context(looking(config))
        until(lambda: looks.served)
        lose(first)
        until(lambda: is_served(port))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        slow = threads.submit(httpx.get, f"http://127.0.0.1:{port}/held", timeout=DEADLINE_S)
        assert replica.is_held.wait(DEADLINE_S)
        second = stack.enter_context(running_haproxy(config, limits, "-dR"))
        until(lambda: running_pid(tmp_path / ADMIN_SOCKET) == second.pid and len(looks.processes) == 1)
        until(lambda: running_pid(tmp_path / STANDBY_SOCKET) is None)
        lose(second)
        until(lambda: is_served(port))
        assert not slow.done() and len(looks.processes) == 2
        replica.is_released.set()
        assert slow.result().text == "ab"


def test_a_configuration_that_no_process_has_served_by_is_not_taken(tmp_path: Path) -> None:
    port, limits = free_port(), front_limits(free_port())
    with running_replica() as replica:
        config = ray_config(tmp_path, port=port, replicas=(replica.server_port,))
        with running_haproxy(config, limits) as first, looking(config) as looks:
            until(lambda: looks.served)
            running = Handed.read(tmp_path)
            replace(running, pid=running.pid + 1, config=running.config + "nonsense\n").write(tmp_path)
            time.sleep(2 * LOOK_S)
            lose(first)
            until(lambda: is_served(port))


def test_a_folder_that_another_start_left_is_not_looked_after(tmp_path: Path) -> None:
    for name in ("0", "1", "2"):
        (tmp_path / name).mkdir()
        ray_config(tmp_path / name)
    assert answering(tmp_path) is None
    with running_haproxy(tmp_path / "1" / "haproxy.cfg", front_limits(free_port())):
        until(lambda: answering(tmp_path) == tmp_path / "1" / "haproxy.cfg")


@pytest.mark.parametrize("next_one", [False, True], ids=["alone", "while the next one takes no requests"])
def test_a_standby_that_is_killed_is_stood_in_for_too(next_one: bool, tmp_path: Path) -> None:
    port, limits = free_port(), front_limits(free_port())
    with running_replica() as replica:
        config = ray_config(tmp_path, port=port, replicas=(replica.server_port,))
        with running_haproxy(config, limits) as first, looking(config) as looks:
            until(lambda: looks.served)
            lose(first)
            until(lambda: is_served(port))
            standby = running_pid(tmp_path / STANDBY_SOCKET)
            assert standby is not None
            with (
                running_haproxy(ray_config(tmp_path, port=port), limits, "-dR") if next_one else nullcontext() as second
            ):
                until(lambda: second is None or running_pid(tmp_path / ADMIN_SOCKET) == second.pid)
                os.kill(standby, signal.SIGKILL)
                until(lambda: is_served(port) and running_pid(tmp_path / STANDBY_SOCKET) not in (None, standby))


def test_a_haproxy_that_has_never_served_is_not_stood_in_for(tmp_path: Path) -> None:
    with running_haproxy(ray_config(tmp_path), front_limits(free_port())) as first, looking(tmp_path / "haproxy.cfg"):
        until(lambda: running_pid(tmp_path / ADMIN_SOCKET) == first.pid)
        lose(first)
        time.sleep(1)
        assert running_pid(tmp_path / STANDBY_SOCKET) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["-x", "/s", "-sf", "7"]),
        (["-dR", "-sf", "1", "2", "-x", "/a"], ["-dR", "-x", "/s", "-sf", "7", "1", "2"]),
        (["-sf", "1"], ["-x", "/s", "-sf", "7", "1"]),
    ],
)
def test_the_next_one_takes_the_listeners_and_ends_all_before(given: list[str], expected: list[str]) -> None:
    assert taking_over(["-db", "-f", "c", *given], 7, socket=Path("/s")) == ["-db", "-f", "c", *expected]


def test_a_standby_has_all_sockets_to_itself(tmp_path: Path) -> None:
    """One that cannot take the ports has taken over its sockets by then."""
    config = ray_config(tmp_path, replicas=(30000,), routers=(30001,))
    handed = configure(config, front_limits(8001))
    assert handed == Handed.read(tmp_path) and handed.has_replicas and handed.takes_requests
    own = config.read_text() + config.with_name("routers.lua").read_text()
    sockets = [set(re.findall(rf"{tmp_path}/(\w)\b", text)) for text in (own, handed.config + handed.script)]
    assert sockets == [{"a", "r"}, {"s", "q"}]
    assert f"lua-load-per-thread {tmp_path}/standby.lua\n" in handed.config
