"""The work of `rayserve-moe scale`: changes an application's number of replicas while it serves.

It uses Serve's REST API, so running requests and replicas are unaffected unless the number decreases.
"""

from __future__ import annotations

import argparse
import sys
import time

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import RayError
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from rayserve_moe.serving.start.deployment import cause_of
from rayserve_moe.serving.start.scaling import check_capacity, scaled_config, settings_of
from rayserve_moe.serving.start.validation import DEPLOYMENT

FAILED = 1
_POLL_S = 0.5
_DRAIN_SLACK_S = 60.0


def run(options: argparse.Namespace, *, address: str) -> int:
    """Scale over the dashboard at `address`; return 0, or 1 with a line on stderr and nothing changed."""
    try:
        _scale(options, address)
    except (ValueError, RuntimeError, ConnectionError, RayError, RayStateApiException) as error:
        sys.stderr.write(f"rayserve-moe scale: {' '.join(str(error).split())}\n")
        return FAILED
    return 0


def _scale(options: argparse.Namespace, address: str) -> None:
    name, number = options.application, options.replicas
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
