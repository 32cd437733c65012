"""Command `rayserve-moe serve CONFIG`, or `serve MODEL --setting value`: validates, then becomes the supervisor.

    this process:  check the config and the model, end processes of an earlier start, choose ports, create the token
      becomes      supervisor    starts the two below, forwards signals, and ends everything
        child      ray start     the cluster of this machine, on 127.0.0.1
        child      deployment    deploys, waits until it is served, watches, and drains

It becomes the supervisor by exec, because Ray Serve reads its ports from the environment at import.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from rayserve_moe.config.derive import keeps_journal, max_live_requests, max_open_requests, server_platform
from rayserve_moe.config.load import inherited_environment, temporary_folder
from rayserve_moe.config.model_names import hub_model
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.observability.progress import PROGRESS_VARIABLE
from rayserve_moe.serving.front.limits import FrontLimits, write_launcher
from rayserve_moe.serving.start.options import add_arguments, config_of
from rayserve_moe.serving.start.ports import Ports, StartError, choose_ports, is_free, owner_of
from rayserve_moe.serving.start.processes import AWAITED, all_processes, end, own_by_path, read_process
from rayserve_moe.serving.start.state import (
    CHECK,
    DEPLOYED,
    FORK_SOCKET,
    PROGRESS,
    Plan,
    ensure_token,
    locked,
    log_folder,
    private_folder,
    running_plans,
)
from rayserve_moe.serving.start.validation import CheckedConfig, TlsFiles, as_deployed, check_config

__all__ = ["add_arguments", "run"]
FAILED = 1
BEGUN = time.time()
"""Time at which this process has loaded the command."""
_ORPHAN_GRACE_S = 1.0
_EVERYWHERE = ("0.0.0.0", "::")
CERTIFICATE = "tls.pem"
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
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "",
    "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE": "2",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "1048576",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment of a cluster on a single machine. Requests reach the replica through HAProxy (ADR 0010).

A dead raylet refuses every health check at once and is lost after 3 s instead of 14; a slow raylet has 15 s.
"""
OF_START = {"RAY_START_HOOK": "rayserve_moe.serving.start.cluster.adapt"}
"""Added to DEFAULTS in the start command's own cluster, which forks its workers (ADR 0017)."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Restricts Ray's processes to 127.0.0.1, except the port for calls between replicas, which Serve opens on every
interface and the token protects."""
LAUNCHER = "haproxy"
_AUTH = "RAY_AUTH_"
"""Prefix of variables that must not be empty: Ray reads an empty RAY_AUTH_MODE as the mode without tokens."""


def run(options: argparse.Namespace) -> int:
    """Serve a config in this process and its children; return 1 if the start is refused."""
    try:
        wanted = config_of(options)
        with tempfile.TemporaryDirectory(prefix="rayserve-config-") as folder:
            path = wanted if isinstance(wanted, Path) else _written(wanted, Path(folder))
            config = check_config(path)
            if options.dry_run:
                return importlib.import_module("rayserve_moe.serving.start.dry_run").run(config)
            arguments = _prepared(config)
        _become(arguments)
    except (SettingsError, StartError) as error:
        sys.stderr.write(f"rayserve-moe serve: {error}\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"rayserve-moe serve: {' '.join(str(error).split())}\n")
    return FAILED


def _written(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _become(arguments: tuple[str, list[str], dict[str, str]]) -> None:
    """Run the supervisor in this process; a signal that arrives earlier stays pending for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    os.execve(*arguments)


def _prepared(config: CheckedConfig) -> tuple[str, list[str], dict[str, str]]:
    """Return the arguments of exec: program, command line and environment of the supervisor."""
    inherited = inherited_environment()
    if inherited.get("RAY_ADDRESS"):
        raise StartError("RAY_ADDRESS is set: this command starts a cluster of its own; `serve run` joins one")
    token = token_path(inherited, Path.home())
    if token is not None:
        ensure_token(token)
    folder, ports = _prepare(config)
    shutil.rmtree(log_folder(folder), ignore_errors=True)
    private_folder(log_folder(folder))
    settings = config.settings.values()
    online = {"HF_HUB_OFFLINE": "0"} if any(hub_model(one.model.path) for one in settings) else {}
    environment = environment_of(
        ports,
        {**online, **inherited, "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', os.defpath)}"},
        folder=folder,
        jax_platforms=jax_platforms_of({server_platform(one.cluster) for one in settings}),
        max_answer_s=max(one.server.drain_timeout_s for one in settings),
        journal_key=secrets.token_hex(32) if any(map(keeps_journal, settings)) else "",
    )
    return sys.executable, [sys.executable, "-m", "rayserve_moe.serving.start.supervisor", str(folder)], environment


JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": ""}
"""Default of JAX_PLATFORMS by platform. If no plugin loads, jax falls back to a listed CPU, so workers check."""

GPU_MEMORY_SHARE = "0.92"
"""Share of a card's memory that jax takes at its start; its default is 0.75."""


def jax_platforms_of(platforms: Set[str]) -> str:
    """Return the variable for the applications of a config; empty leaves the platform to jax.

    Raises: StartError if some compute on GPUs and others do not: they share the variable.
    """
    if len(platforms) > 1 and "gpu" in platforms:
        raise StartError(
            f"platform is {' and '.join(sorted(platforms))} in one config: GPUs need a config of their own"
        )
    return "" if "tpu" in platforms else JAX_PLATFORMS[next(iter(platforms))]


def _prepare(config: CheckedConfig) -> tuple[Path, Ports]:
    """Acquire the deployment's state folder and ports.

    Raises: StartError if its HTTP port is taken.
    """
    root = private_folder(temporary_folder() / f"rayserve-{os.getuid()}")
    with locked(root):
        others = running_plans(root)
        folder = private_folder(root / str(config.port))
        if folder in others:
            raise StartError(f"port {config.port} is served already, by process {others[folder].pid}")
        end_orphans(folder)
        _check_front(config)
        for name in (FORK_SOCKET, CHECK, DEPLOYED):  # left by a killed start
            (folder / name).unlink(missing_ok=True)
        (folder / PROGRESS).write_bytes(b"")
        claimed = {plan.first_port for plan in others.values()}
        ports = choose_ports(config.port, claimed=claimed, is_free=is_free)
        _write(folder, ports, config)
    return folder, ports


def _check_front(config: CheckedConfig) -> None:
    """Raise StartError if HAProxy could not listen."""
    try:
        is_possible = is_free(config.port, "" if config.host in _EVERYWHERE else config.host)
    except OSError as error:
        raise StartError(f"http_options {config.host}, port {config.port}: {error.strerror}") from error
    if not is_possible:
        raise StartError(f"port {config.port} of http_options is taken by {owner_of(config.port)}")


def end_orphans(folder: Path) -> None:
    """End HAProxy and other processes with a file of this folder, left by an ended start.

    Raises: StartError if a process does not end.
    """
    left = end(
        lambda: own_by_path(folder, all_processes().values(), user=os.getuid()),
        first=signal.SIGTERM,
        grace_s=_ORPHAN_GRACE_S,
    )
    if left:
        raise StartError(f"process {left[0].pid} ({left[0].title}) of an earlier start does not end")


def _write(folder: Path, ports: Ports, config: CheckedConfig) -> None:
    this = read_process(os.getpid())
    assert this is not None, "this process runs"
    settings = config.settings.values()
    shown = "127.0.0.1" if config.host in _EVERYWHERE else config.host
    Plan(
        pid=this.pid,
        begun=BEGUN,
        started=this.started,
        first_port=ports.first,
        config=as_deployed(config),
        url=f"{'http' if config.tls is None else 'https'}://{shown}:{config.port}",
        drain_timeout_s=max(one.server.drain_timeout_s for one in settings),
        start_timeout_s=max(one.cluster.start_timeout_s for one in settings),
        journal_max_bytes=sum(one.server.journal_max_bytes for one in settings if keeps_journal(one)),
        resume_ttl_s=max(one.server.resume_ttl_s for one in settings),
    ).write(folder)
    max_open = sum(max_open_requests(one.scheduler, num_data_ranks=one.parallel.data_parallel_size) for one in settings)
    capacity = {
        name: max_live_requests(one.scheduler, num_data_ranks=one.parallel.data_parallel_size)
        for name, one in config.settings.items()
    }
    limits = FrontLimits(
        health_port=ports.health,
        max_connections=2 * max_open,
        max_connections_per_source=max_open,
        capacity=capacity,
        host="*" if config.host in _EVERYWHERE else config.host,
        certificate=linked_certificate(config.tls, folder) if config.tls else "",
    )
    write_launcher(folder / LAUNCHER, limits)


def linked_certificate(tls: TlsFiles, folder: Path) -> str:
    """Link a certificate and its key by the names that HAProxy looks for; return the certificate's path.

    With links HAProxy reads renewed files whenever it starts anew.
    """
    certificate = folder / CERTIFICATE
    for link, target in ((certificate, tls.certificate), (folder / f"{CERTIFICATE}.key", tls.key)):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return str(certificate)


def token_path(inherited: Mapping[str, str], home: Path) -> Path | None:
    """Return the path of Ray's token file, or None if the environment holds the token itself.

    Raises: StartError if tokens are disabled, because a replica accepts pickled calls on every interface.
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
    max_answer_s: float,
    journal_key: str = "",
) -> dict[str, str]:
    """Return the complete environment of a deployment with its state in `folder`.

    The user's variables override defaults. `jax_platforms` is the default for jax; empty leaves it to jax. A replaced
    HAProxy process has `max_answer_s` for its streams. With a `journal_key`, replicas connect to the journal.
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
    defaults = {**DEFAULTS, **OF_START, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(max_answer_s))}
    if journal_key:
        own["RAYSERVE_MOE_JOURNAL"], own["RAYSERVE_MOE_JOURNAL_KEY"] = f"127.0.0.1:{ports.journal}", journal_key
    if jax_platforms:
        defaults["JAX_PLATFORMS"] = jax_platforms
    if jax_platforms == JAX_PLATFORMS["gpu"]:
        defaults["XLA_PYTHON_CLIENT_MEM_FRACTION"] = GPU_MEMORY_SHARE
    given = {name: value for name, value in inherited.items() if value or not name.startswith(_AUTH)}
    return {**defaults, **given, **LOOPBACK_ONLY, **{name: str(value) for name, value in own.items()}}
