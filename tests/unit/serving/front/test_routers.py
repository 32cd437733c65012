"""Routers behind a listener of HAProxy: what is lost of them delays and refuses nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rayserve_moe.serving.front.launcher import UnknownTemplateError, configure, read_script
from rayserve_moe.serving.front.limits import ROUTER_CONNECTIONS
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import (
    RouterServer,
    Server,
    front_limits,
    ray_config,
    running_haproxy,
    running_replica,
    wait_until_open,
)

DEADLINE_S = 60.0
RETRIED_S = 3.0
"""What a request takes where Ray's script meets a router that is gone."""
LIMITS = front_limits(8001)


@dataclass
class Routed:
    """Two replicas, two routers that each name one of them, and HAProxy before them."""

    port: int
    replicas: list[Server]
    routers: list[RouterServer]

    def post(self) -> float:
        """Ask; returns the seconds."""
        began = time.monotonic()
        assert httpx.post(f"http://127.0.0.1:{self.port}/", content=b"{}", timeout=DEADLINE_S).text == "ab"
        return time.monotonic() - began


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        replicas = [stack.enter_context(running_replica()) for _ in range(2)]
        routers = [stack.enter_context(closing(RouterServer(f"replica-{one.server_port}"))) for one in replicas]
        port, limits = free_port(), front_limits(free_port())
        numbers = {"replicas": tuple(one.server_port for one in replicas)}
        numbers["routers"] = tuple(one.server_port for one in routers)
        stack.enter_context(running_haproxy(ray_config(tmp_path, port=port, **numbers), limits))
        wait_until_open(port)
        yield Routed(port, replicas, routers)


def test_both_routers_are_asked(routed: Routed) -> None:
    for _ in range(8):
        routed.post()
    assert sum(router.num_asked for router in routed.routers) == 8
    assert all(router.num_asked for router in routed.routers)


def test_a_request_that_meets_a_lost_router_does_not_wait(routed: Routed) -> None:
    routed.routers[0].close()
    fastest = [min(routed.post() for _ in range(2)) for _ in range(4)]  # every other one meets it
    slowest = [max(routed.post() for _ in range(2)) for _ in range(4)]
    assert min(slowest) < RETRIED_S and min(fastest) < RETRIED_S
    assert routed.routers[1].num_asked == 16


def test_without_a_router_requests_go_to_the_replicas(routed: Routed) -> None:
    for router in routed.routers:
        router.close()
    assert min(routed.post() for _ in range(4)) < RETRIED_S


def test_a_burst_is_routed_whole(routed: Routed) -> None:
    """More requests at once than may ask routers at once: the others wait."""
    count = 4 * ROUTER_CONNECTIONS
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda _: routed.post(), range(count)))
    assert sum(router.num_asked for router in routed.routers) == count


def test_routers_are_read_from_rays_script(tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=(30000,), routers=(30001, 30002))
    script = config.with_name("ingress_request_router.lua").read_text()
    before, routers, after = read_script(script)
    assert routers == {"http-moe": ["127.0.0.1:30001", "127.0.0.1:30002"]}
    assert script.startswith(before) and script.endswith(after)


@pytest.mark.parametrize("lost", ["local ROUTERS = {", "host = ", '["http-moe"] = {'])
def test_a_script_without_a_list_of_routers_is_refused(lost: str, tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=(30000,), routers=(30001,))
    script = config.with_name("ingress_request_router.lua")
    script.write_text(script.read_text().replace(lost, "other"))
    with pytest.raises(UnknownTemplateError, match="no list of them"):
        configure(config, LIMITS)
