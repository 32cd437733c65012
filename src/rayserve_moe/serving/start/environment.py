"""The environment of the processes of a start. Pure: the user's variables win, except for ports and paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rayserve_moe.observability.progress import PROGRESS_VARIABLE
from rayserve_moe.serving.start.ports import Ports, StartError
from rayserve_moe.serving.start.state import PROGRESS

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE": "2",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "1048576",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Of a cluster on one machine. Requests reach the replica through HAProxy (ADR 0010). A raylet that is gone refuses
every health check at once, and is lost after 3 s instead of 14; one that is only slow has 15 s."""
OF_START = {"RAY_START_HOOK": "rayserve_moe.serving.start.cluster.adapt"}
"""Added to DEFAULTS in the start command's own cluster, which forks its workers (ADR 0036)."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray's processes listen on 127.0.0.1 alone, except on the port by which replicas call each other, which Serve
opens on every interface: the token protects it."""
LAUNCHER = "haproxy"
_AUTH = "RAY_AUTH_"
"""Ray reads an empty RAY_AUTH_MODE as the mode without tokens."""


def token_path(inherited: Mapping[str, str], home: Path) -> Path | None:
    """Return where Ray looks for the token; None where the environment holds the token itself.

    StartError where tokens are switched off: a replica takes pickled calls on every interface of the machine.
    """
    if (mode := inherited.get("RAY_AUTH_MODE") or "token") != "token":
        raise StartError(f"RAY_AUTH_MODE is {mode}: anyone who can reach this machine could run code in it; unset it")
    if inherited.get("RAY_AUTH_TOKEN"):
        return None
    return Path(inherited.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")


def environment_of(
    ports: Ports,
    inherited: Mapping[str, str],
    *,
    folder: Path,
    jax_platforms: str,
    longest_answer_s: float,
    journal_key: str = "",
) -> dict[str, str]:
    """Return the whole environment of a deployment whose state is in `folder`.

    `jax_platforms` is the default for jax; empty leaves it to jax. A replaced HAProxy process has `longest_answer_s`
    for its streams. With a `journal_key` replicas find the journal.
    """
    first, last = ports.replicas
    first_grpc, last_grpc = ports.grpc_replicas
    own = {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": ports.fallback_http,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": ports.fallback_grpc,
        "RAY_SERVE_HAPROXY_METRICS_PORT": ports.haproxy_metrics,
        "RAY_SERVE_HAPROXY_STATS_PORT": ports.haproxy_statistics,
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": first,
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": last,
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": first_grpc,
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": last_grpc,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": folder / "a",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": folder / "m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": folder / "server-state",
        "RAY_SERVE_HAPROXY_BINARY_PATH": folder / LAUNCHER,
        PROGRESS_VARIABLE: folder / PROGRESS,
    }
    defaults = {**DEFAULTS, **OF_START, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(longest_answer_s))}
    if journal_key:
        own["RAYSERVE_MOE_JOURNAL"], own["RAYSERVE_MOE_JOURNAL_KEY"] = f"127.0.0.1:{ports.journal}", journal_key
    if jax_platforms:
        defaults["JAX_PLATFORMS"] = jax_platforms
    given = {name: value for name, value in inherited.items() if value or not name.startswith(_AUTH)}
    return {**defaults, **given, **LOOPBACK_ONLY, **{name: str(value) for name, value in own.items()}}
