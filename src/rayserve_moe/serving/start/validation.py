"""Checks of a Serve config without Ray and jax, before anything is started.

`model_check` checks the rest, with the libraries that the server loads anyway.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rayserve_moe.config.derive import server_platform
from rayserve_moe.config.load import read_yaml, settings_from
from rayserve_moe.config.model_names import model_fault
from rayserve_moe.config.settings import Settings
from rayserve_moe.execution.native_levels import AUTO, NativeKernelsUnavailable, choose_level
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION

DEPLOYMENT = "moe-server"
GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
"""Plugins of jax for NVIDIA GPUs; one of them must be installed."""
_TLS = "ssl_"
"""Prefix of the options of TLS."""
LOOPBACK, HTTP_PORT = "127.0.0.1", 8000
"""Serve's default address."""

# Keys of a Serve config, by section, from Ray Serve's schemas, which take seconds to import.
TOP_KEYS = (
    "proxy_location",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    "applications",
    "target_capacity",
)
HTTP_OPTIONS_KEYS = (
    "host",
    "port",
    "root_path",
    "request_timeout_s",
    "keep_alive_timeout_s",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
)
GRPC_OPTIONS_KEYS = ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection")
APPLICATION_KEYS = (
    "name",
    "route_prefix",
    "import_path",
    "runtime_env",
    "host",
    "port",
    "deployments",
    "autoscaling_policy",
    "args",
    "logging_config",
    "external_scaler_enabled",
)
DEPLOYMENT_KEYS = (
    "name",
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "backpressure_config",
    "user_config",
    "autoscaling_config",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "max_replicas_per_node",
    "logging_config",
    "request_router_config",
    "gang_scheduling_config",
    "deployment_actors",
    "rolling_update_percentage",
    "max_surge_percent",
)


@dataclass(frozen=True)
class CheckedConfig:
    """Validated Serve config, with the settings of our applications by name."""

    document: dict[str, Any]
    settings: dict[str, Settings]
    host: str
    port: int
    tls: TlsFiles | None = None


class TlsFiles(NamedTuple):
    """Absolute paths of a certificate chain and its key, in PEM."""

    certificate: Path
    key: Path


def check_config(path: Path) -> CheckedConfig:
    """Read a config file and check keys, settings and paths.

    Raises: ValueError with the file or key at fault.
    """
    document = _read(path)
    for place, mapping, known in _sections(document):
        _refuse_unknown(mapping, known, place=f"{path}: {place}")
    http = document.get("http_options") or {}
    port = _checked_port(path, http)
    ours = {
        application.get("name", "default"): settings_from(application.get("args") or {})
        for application in _applications(path, document)
        if application["import_path"] == APPLICATION
    }
    if not ours:
        raise StartError(f"{path}: no application has import_path {APPLICATION}")
    for settings in ours.values():
        _check_model(settings.model.path)
        check_platform(settings)
        _check_level(settings)
    return CheckedConfig(document, ours, http.get("host") or LOOPBACK, port, _checked_tls(path, http))


def as_deployed(config: CheckedConfig) -> dict[str, Any]:
    """Return the config to deploy: a single attempt to load a model, and only HAProxy listens beyond loopback.

    TLS ends at HAProxy: Serve's own options for it would have replicas speak TLS, which HAProxy does not expect.
    """
    applications = []
    for application in config.document["applications"]:
        deployments = [dict(deployment) for deployment in application.get("deployments") or []]
        if application.get("name", "default") in config.settings:
            if not any(deployment["name"] == DEPLOYMENT for deployment in deployments):
                deployments.append({"name": DEPLOYMENT})
            ours = next(deployment for deployment in deployments if deployment["name"] == DEPLOYMENT)
            ours.setdefault("max_constructor_retry_count", 1)
        applications.append({**application, "deployments": deployments})
    given = config.document.get("http_options") or {}
    http = {name: value for name, value in given.items() if not name.startswith(_TLS)} | {"host": LOOPBACK}
    return {**config.document, "http_options": http, "applications": applications}


def _read(path: Path) -> dict[str, Any]:
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise StartError(f"{path}: a Serve config is a mapping with applications")
    return document


def _sections(document: dict[str, Any]) -> Iterator[tuple[str, object, Sequence[str]]]:
    """Yield the mappings of a config with their places and known keys; Serve itself ignores unknown keys."""
    yield "", document, TOP_KEYS
    yield "http_options.", document.get("http_options") or {}, HTTP_OPTIONS_KEYS
    yield "grpc_options.", document.get("grpc_options") or {}, GRPC_OPTIONS_KEYS
    applications = document.get("applications")
    for number, application in enumerate(applications if isinstance(applications, list) else []):
        yield f"applications.{number}.", application, APPLICATION_KEYS
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for other, deployment in enumerate(deployments if isinstance(deployments, list) else []):
            yield f"applications.{number}.deployments.{other}.", deployment, DEPLOYMENT_KEYS


def _refuse_unknown(mapping: object, known: Sequence[str], *, place: str) -> None:
    for name in mapping if isinstance(mapping, dict) else ():
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(sorted(known))}"
            raise StartError(f"{place}{name}: unknown key; {hint}")


def _checked_port(path: Path, http: object) -> int:
    if not isinstance(http, dict):
        raise StartError(f"{path}: http_options must be a mapping")
    port = http.get("port", HTTP_PORT)
    if isinstance(port, str) and port.isdigit():
        port = int(port)
    if type(port) is not int:
        raise StartError(f"{path}: http_options.port must be an integer, found {port!r}")
    if not 0 < port < 2**16:
        raise StartError(f"{path}: http_options.port must lie in [1, {2**16 - 1}], found {port}")
    return port


def _checked_tls(path: Path, http: Mapping[str, Any]) -> TlsFiles | None:
    """Return the files of `ssl_certfile` and `ssl_keyfile`, or None without them.

    Raises: StartError if one is missing or unreadable, they do not belong together, or the key has a password.
    """
    for name in ("ssl_keyfile_password", "ssl_ca_certs"):
        if http.get(name):
            raise StartError(f"{path}: http_options.{name} is not supported: give a key without a password, and no CA")
    certificate, key = http.get("ssl_certfile"), http.get("ssl_keyfile")
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise StartError(f"{path}: http_options.ssl_certfile and ssl_keyfile must be given together")
    files = TlsFiles(*(Path(str(name)).expanduser().absolute() for name in (certificate, key)))
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*files, password=_no_password)
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StartError(f"ssl_certfile {files.certificate}, ssl_keyfile {files.key}: {reason}") from error
    return files


def _no_password() -> str:
    raise ValueError("the key has a password")


def _applications(path: Path, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the applications of a config, each with an import path and a mapping of arguments."""
    applications = document.get("applications")
    if not isinstance(applications, list):
        raise StartError(f"{path}: applications must be a list")
    for number, application in enumerate(applications):
        place = f"{path}: applications.{number}"
        if not isinstance(application, dict) or not isinstance(application.get("import_path"), str):
            raise StartError(f"{place}: an application is a mapping with an import_path")
        if not isinstance(application.get("args") or {}, dict):
            raise StartError(f"{place}.args: must be a mapping")
        for other, deployment in enumerate(application.get("deployments") or []):
            if not isinstance(deployment, dict) or "name" not in deployment:
                raise StartError(f"{place}.deployments.{other}: a deployment is a mapping with a name")
    return applications


def _check_model(model_path: str) -> None:
    """Raise StartError for a path that names no model on this machine, on the Hub or behind a URL."""
    if fault := model_fault(model_path):
        raise StartError(f"model_path {model_path}: {fault}")


def check_platform(settings: Settings, *, devices: Path = Path("/dev")) -> None:
    """Raise StartError if a platform is requested that this machine, or this installation, does not have.

    TPU hosts are other machines; they are reserved by their topology.
    """
    cluster = settings.cluster
    if cluster.platform == "tpu" and not cluster.tpu_topology:
        raise StartError("platform tpu: a server reserves TPUs by tpu_topology and tpu_version; set both")
    if cluster.platform != "gpu":
        return
    if not list(devices.glob("nvidia[0-9]*")):
        raise StartError(f"platform gpu: this machine has no NVIDIA GPU ({devices}/nvidia0); set platform: cpu")
    if not any(find_spec(name) for name in GPU_PLUGINS):
        raise StartError("platform gpu: jax has no plugin for GPUs here; pip install 'rayserve_moe[gpu]'")
    if settings.parallel.num_hosts > 1:
        raise StartError("platform gpu: one process computes on all GPUs of a machine; set num_hosts: 1")


def _check_level(settings: Settings) -> None:
    """Raise StartError for instructions that the processor does not support.

    Hosts of other platforms do not use these instructions.
    """
    level = settings.compile.cpu_level
    if level == AUTO or settings.compile.cpu_kernels == "off" or server_platform(settings.cluster) != "cpu":
        return
    try:
        choose_level(level)
    except NativeKernelsUnavailable as error:
        raise StartError(f"cpu_level {level}: {error}") from error
