"""Command `rayserve-moe scale APP N`: changes an application's number of replicas while it serves.

It uses Serve's REST API, so running requests and replicas are unaffected unless the number decreases.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import RayError
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from rayserve_moe.config.load import inherited_environment, temporary_folder
from rayserve_moe.serving.start.deployment import cause_of
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.scaling import check_capacity, scaled_config, settings_of
from rayserve_moe.serving.start.state import APPLICATION, running_plans
from rayserve_moe.serving.start.validation import DEPLOYMENT

FAILED = 1
_AUTH_MODE = "RAY_AUTH_MODE"
_POLL_S = 0.5
_DRAIN_SLACK_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("application", help="name of the application in the config")
    parser.add_argument("replicas", type=int, help="number of replicas")
    parser.add_argument("--address", default="", help="Ray's dashboard (default: of the server on this machine)")
    parser.add_argument("--cluster-grows", action="store_true", help="do not check that enough hosts exist now")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as Serve has accepted the number")


def run(options: argparse.Namespace) -> int:
    """Scale; return 0, or 1 with a line on stderr and nothing changed.

    Ray reads its token mode at import, so this process re-executes itself if the mode is unset.
    """
    environment = inherited_environment()
    if not environment.get(_AUTH_MODE):
        command = [sys.executable, "-m", "rayserve_moe.cli", "scale", *_arguments(options)]
        os.execve(sys.executable, command, {**environment, _AUTH_MODE: "token"})
    try:
        _scale(options)
    except (ValueError, RuntimeError, ConnectionError, RayError, RayStateApiException) as error:
        sys.stderr.write(f"rayserve-moe scale: {' '.join(str(error).split())}\n")
        return FAILED
    return 0


def _arguments(options: argparse.Namespace) -> list[str]:
    flags = [f"--{name.replace('_', '-')}" for name in ("cluster_grows", "no_wait") if getattr(options, name)]
    return [options.application, str(options.replicas), f"--address={options.address}", *flags]


def dashboard_of(application: str) -> str:
    """Return the dashboard of the server on this machine that serves an application.

    Raises: StartError unless exactly one server does.
    """
    plans = running_plans(temporary_folder() / f"rayserve-{os.getuid()}")
    ours = [plan for plan in plans.values() if application in _names(plan.config)]
    if len(ours) == 1:
        return f"http://127.0.0.1:{ours[0].ports.dashboard}"
    if ours:
        raise StartError(f"{len(ours)} servers serve {application}: give the --address of one of their dashboards")
    served = sorted({name for plan in plans.values() for name in _names(plan.config)})
    raise StartError(f"no server of yours on this machine serves {application!r} (served: {', '.join(served) or '-'})")


def _names(config: dict[str, Any]) -> list[str]:
    return [one.get("name", "default") for one in config["applications"] if one["import_path"] == APPLICATION]


def _scale(options: argparse.Namespace) -> None:
    name, number = options.application, options.replicas
    address = options.address or dashboard_of(name)
    client = ServeSubmissionClient(address)
    before = client.get_serve_details()
    config = scaled_config(before, application=name, num_replicas=number)
    settings = settings_of(before, name)
    if not options.cluster_grows:
        nodes = list_nodes(address=address, filters=[("state", "=", "ALIVE")], detail=True)
        check_capacity(settings, num_replicas=number, nodes=[node.resources_total or {} for node in nodes])
    client.deploy_applications(config)
    if options.no_wait:
        return
    _wait(client, options, limit_s=settings.cluster.start_timeout_s + settings.server.drain_timeout_s + _DRAIN_SLACK_S)
    sys.stdout.write(f"rayserve-moe scale: {name} has {number} replicas\n")


def _wait(client: ServeSubmissionClient, options: argparse.Namespace, *, limit_s: float) -> None:
    """Wait until exactly the requested replicas run.

    Raises: RuntimeError if a replica cannot start, or after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        deployment = client.get_serve_details()["applications"][options.application]["deployments"][DEPLOYMENT]
        states = [replica["state"] for replica in deployment["replicas"]]
        if states == ["RUNNING"] * options.replicas and deployment["status"] == "HEALTHY":
            return
        if deployment["status"] in ("DEPLOY_FAILED", "UNHEALTHY") and "STARTING" not in states:
            raise RuntimeError(f"a replica does not start: {cause_of(deployment['message'])}")
        time.sleep(_POLL_S)
    raise RuntimeError(f"{options.replicas} replicas do not run within {limit_s:g} s: {states}")
