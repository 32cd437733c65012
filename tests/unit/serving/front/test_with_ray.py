"""Ray's own manager of HAProxy starts, reloads, drains and stops it through our launcher."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from ray.serve._private import haproxy

from rayserve_moe.serving.front.limits import FrontLimits, write_launcher
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import RouterServer, running_replica
from tests.support.serving.ray_fronts import App, Scenario, ray_api

DEADLINE_S = 60.0


async def ask(port: int, path: str, method: str = "GET") -> httpx.Response:
    url = f"http://127.0.0.1:{port}{path}"
    content = b"{}" if method == "POST" else None
    return await asyncio.to_thread(httpx.request, method, url, content=content, timeout=DEADLINE_S)


def test_ray_starts_reloads_drains_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = FrontLimits(free_port(), max_connections=400, max_connections_per_source=300, capacity={"moe": 4})
    launcher = write_launcher(tmp_path / "haproxy", limits)
    monkeypatch.setattr(haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", str(launcher))

    async def run(replica: int, router: RouterServer) -> None:
        port = free_port()
        known = {"has_received_routes": True}
        api = ray_api(tmp_path, Scenario((), known), port=port, ports=(free_port(), free_port()))
        await api.start()
        try:
            assert (await ask(port, "/health")).json()["error"]["code"] == "no_replica"
            served = Scenario((App("moe", replicas=(replica,), routers=(router.server_port,)),))
            api.set_backend_configs(ray_api(tmp_path, served).backend_configs)
            await api.reload()
            assert (await ask(port, "/")).text == (await ask(port, "/", "POST")).text == "ab"
            assert router.num_asked == 1
            assert (await ask(port, "/-/routes")).json() == {"/": "moe"}
            assert await api.compute_target_mismatch() == 0
            await api.disable()
            assert (await ask(port, "/-/healthz")).status_code == 503
            assert (await ask(port, "/")).text == "ab"
            await api.enable()
            assert (await ask(port, "/-/healthz")).status_code == 200
        finally:
            await api.stop()

    with running_replica() as replica, closing(RouterServer(f"replica-{replica.server_port}")) as router:
        asyncio.run(run(replica.server_port, router))
