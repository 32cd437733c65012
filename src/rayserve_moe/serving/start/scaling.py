"""Serve config that changes only an application's number of replicas. Pure functions.

Serve hashes `args` into the code version of an application and restarts every replica if they change; an override under
`deployments` is applied to running replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import Settings
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION
from rayserve_moe.serving.start.validation import DEPLOYMENT

REPLICA_CPUS = 0.5
"""CPUs of the engine process, besides the CPUs of its hosts."""
MAX_REPLICAS = 4096


def check_number(num_replicas: int) -> None:
    """Raise StartError for a number of replicas out of range."""
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise StartError(f"the number of replicas must lie in [1, {MAX_REPLICAS}], found {num_replicas}")


def scaled_config(details: Mapping[str, Any], *, application: str, num_replicas: int) -> dict[str, Any]:
    """Return the deployed config in Serve's `details`, with this number of replicas.

    Raises: StartError for an application that is missing, not ours, deployed by code, or autoscaled.
    """
    check_number(num_replicas)
    found = details.get("applications") or {}
    config = _config_of(found, application)
    overrides = [dict(override) for override in config.get("deployments") or []]
    if not any(override["name"] == DEPLOYMENT for override in overrides):
        overrides.append({"name": DEPLOYMENT})
    ours = next(override for override in overrides if override["name"] == DEPLOYMENT)
    is_scaled = settings_from(config.get("args") or {}).replicas.max_replicas
    if is_scaled or ours.get("autoscaling_config") or ours.get("num_replicas") == "auto":
        raise StartError(f"{application} is scaled by its demand: its bounds are min_replicas and max_replicas")
    ours["num_replicas"] = num_replicas
    others = [one["deployed_app_config"] for name, one in found.items() if name != application]
    if None in others:
        raise StartError("another application was deployed by code, and a config would end it")
    front = {name: details[name] for name in ("proxy_location", "http_options", "grpc_options") if details.get(name)}
    return {**front, "applications": [*others, {**config, "deployments": overrides}]}


def settings_of(details: Mapping[str, Any], application: str) -> Settings:
    """Return the settings of one of our applications."""
    return settings_from(_config_of(details.get("applications") or {}, application).get("args") or {})


def check_capacity(settings: Settings, *, num_replicas: int, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise StartError if nodes with these total resources cannot hold `num_replicas` replicas."""
    cluster, hosts = settings.cluster, settings.parallel.num_hosts
    chips = float(cluster.tpu_chips_per_host or 0)
    needed = {"CPU": REPLICA_CPUS + (0.0 if cluster.tpu_topology else hosts * cluster.cpus_per_host)}
    needed |= {"TPU": hosts * chips} if cluster.tpu_topology else {}
    needed |= {"GPU": float(settings.parallel.devices_per_host or 1)} if cluster.platform == "gpu" else {}
    for resource, amount in needed.items():
        total = sum(node.get(resource, 0.0) for node in nodes)
        if num_replicas * amount > total + 1e-9:
            num_fitting = int((total + 1e-9) // amount)
            raise StartError(
                f"the cluster has {total:g} {resource}, {num_replicas} replicas take {num_replicas * amount:g}: "
                f"at most {num_fitting} fit"
            )


def _config_of(found: Mapping[str, Any], application: str) -> dict[str, Any]:
    if application not in found:
        raise StartError(f"unknown application {application!r}; known: {', '.join(sorted(found)) or 'none'}")
    config = found[application].get("deployed_app_config")
    if config is None:
        raise StartError(f"{application} was deployed by code, not by a config: scale it there")
    if config.get("import_path") != APPLICATION:
        raise StartError(f"{application} is not one of ours: its import_path is {config.get('import_path')}")
    return dict(config)
