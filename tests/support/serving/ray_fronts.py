"""HAProxy configurations of the installed Ray for applications of all kinds, with fixed names and ports."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
from ray.serve._private import haproxy
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions


class KeptTemplates(jinja2.Environment):
    """Compiles each of Ray's templates once; compiling takes half the time of a configuration."""

    @cache  # noqa: B019
    def from_string(self, source: str) -> jinja2.Template:
        return super().from_string(source)


TEMPLATES = KeptTemplates()
DIRECTORY = "/front"
"""Stands for the directory of the configuration in a recorded text."""


@dataclass(frozen=True)
class App:
    """An application, with the ports of its replicas, named `replica-PORT`, and of its routers."""

    name: str
    prefix: str = "/"
    replicas: tuple[int, ...] = (30000,)
    routers: tuple[int, ...] = ()
    has_fallback: bool = True
    deployment: str = "moe-server"


@dataclass(frozen=True)
class Scenario:
    """What a Ray configuration is generated for, and how the front is limited."""

    apps: tuple[App, ...] = (App("moe"),)
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of Ray's HAProxyConfig."""
    constants: dict[str, Any] = field(default_factory=lambda: {"RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": False})
    """Constants of Ray's module, which it reads from environment variables."""
    limits: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    grpc: bool = False


ROUTED = {
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": True,
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": 1048576,
}
SCENARIOS = {
    "nothing known": Scenario(apps=()),
    "no replica": Scenario(apps=(), config={"has_received_routes": True}),
    "one replica": Scenario(limits={"capacity": {"moe": 8}}),
    "started command": Scenario(
        (App("model", replicas=(30000, 30001), routers=(30010, 30011)),),
        {"has_received_routes": True},
        ROUTED,
        {"capacity": {"model": 8}, "host": "*"},
    ),
    "two applications": Scenario(
        (
            App("a/b c", "/a", (30000, 30001, 30002), (30010,), deployment='a "quoted" one'),
            App("plain", "/", (30003,), has_fallback=False),
            App("third", "/a/long", (30004,), deployment=""),
        ),
        {"has_received_routes": True, "metrics_enabled": False},
        ROUTED,
        {"capacity": {"a/b c": 3, "third": 5}, "head_timeout_s": 3, "body_timeout_s": 4},
    ),
    "draining": Scenario(
        config={"has_received_routes": True, "pass_health_checks": False, "is_head": False}, host="0.0.0.0"
    ),
    "all options": Scenario(
        (App("moe", "/v", (30000,), (30010,)),),
        {
            "has_received_routes": True,
            "enable_hap_optimization": True,
            "tcp_nodelay": True,
            "retries": 3,
            "close_spread_time_s": 7,
            "hard_stop_after_s": None,
            "timeout_queue_s": 9,
            "timeout_http_request_s": 11,
            "ingress_timeout_server_s": 13,
            "ingress_request_router_metrics_enabled": True,
            "inject_process_id_header": True,
            "reload_id": "first",
        },
        ROUTED,
        {"capacity": {"moe": 2}},
        host="::1",
    ),
    "no marking down, no timeouts": Scenario(
        config={
            "observe_mark_down_enabled": False,
            "enable_hap_optimization": False,
            "tcp_nodelay": False,
            "timeout_connect_s": None,
            "timeout_server_s": None,
        }
    ),
    "gRPC": Scenario((App("moe", routers=(30010,)), App("other", "/other", (30005,))), grpc=True),
}


def ray_api(
    directory: Path, scenario: Scenario, *, port: int = 8000, ports: tuple[int, int] = (9101, 8404)
) -> HAProxyApi:
    """Return Ray's writer of the configuration `directory/haproxy.cfg`; `ports` are of its metrics and statistics."""
    config = HAProxyConfig(
        http_options=HTTPOptions(host=scenario.host, port=port),
        grpc_options=gRPCOptions(port=9000, grpc_servicer_functions=["x.y"] if scenario.grpc else []),
        **{
            "is_head": True,
            "socket_path": str(directory / "a"),
            "server_state_base": str(directory),
            "server_state_file": str(directory / "server-state"),
            "metrics_socket_path": str(directory / "metrics.sock"),
            "metrics_port": ports[0],
            "stats_port": ports[1],
            "metrics_enabled": True,
            "hard_stop_after_s": 60,
            **scenario.config,
        },
    )
    backends = [_backend(app, RequestProtocol.HTTP) for app in scenario.apps]
    if scenario.grpc:
        backends += [_backend(app, RequestProtocol.GRPC) for app in scenario.apps]
    api = HAProxyApi(config, {one.name: one for one in backends}, str(directory / "haproxy.cfg"))
    if scenario.grpc:
        api.set_grpc_fallback_server(ServerConfig("fallback", "127.0.0.1", 2))
    return api


def write_ray_config(directory: Path, scenario: Scenario, **ports: Any) -> Path:
    """Have Ray write the configuration, and a script if there are routers; return its path."""
    with patch.multiple(haproxy, **scenario.constants), patch.object(jinja2, "Environment", lambda: TEMPLATES):
        ray_api(directory, scenario, **ports)._generate_config_file_internal()
    return directory / "haproxy.cfg"


def _backend(app: App, protocol: RequestProtocol) -> BackendConfig:
    safe = haproxy.HAProxyManager.get_safe_name
    kind = protocol.value.lower()
    return BackendConfig(
        safe(f"{kind}-{app.name}"),
        app.prefix,
        servers=[
            ServerConfig(f"server-{port}", "127.0.0.1", port, replica_id=f"replica-{port}") for port in app.replicas
        ],
        ingress_request_router_servers=[ServerConfig(f"router-{port}", "127.0.0.1", port) for port in app.routers],
        fallback_server=ServerConfig("fallback", "127.0.0.1", 1) if app.has_fallback else None,
        app_name=app.name,
        ingress_deployment_name=app.deployment,
        protocol=protocol,
    )


def directives(text: str) -> list[str]:
    """Return the directives of a configuration in order, with single spaces and without comments."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
