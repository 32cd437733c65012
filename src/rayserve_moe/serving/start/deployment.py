"""Process that deploys the config of a start, reports when it is served, watches it, and drains it on SIGTERM.

python -m rayserve_moe.serving.start.deployment STATE_FOLDER
"""

from __future__ import annotations

import http.client
import logging
import re
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import worker
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ServeDeploySchema

from rayserve_moe.serving.start.console import Console, ProgressLines, model_of, what_to_try
from rayserve_moe.serving.start.ports import is_free
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import APPLICATION, DEPLOYED, Plan, log_folder, read_check
from rayserve_moe.serving.start.supervisor import DEPLOYMENT_FAILED, UNANSWERED

_POLL_S = 0.1
_WATCH_S = 2.0
_ANSWER_S = 10.0
_FLUSH_S = 5.0
"""Time for error events to reach their clients."""
_DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
)
"""Opener for URLs of this machine, without the environment's proxies; certificates have other names than 127.0.0.1."""
_GONE = (RayError, RayServeException)
"""Errors of a call to a lost replica, which runs nothing."""


console = Console()


class DeploymentFailed(RuntimeError):
    """Error for an application that cannot be served, or is no longer served."""


class StopSignal:
    """Flag that is set by SIGTERM."""

    def __init__(self) -> None:
        self.is_set = False
        self.listen()

    def listen(self) -> None:
        """Install the handler; must be repeated after Ray has replaced it."""
        signal.signal(signal.SIGTERM, self._set)

    def wait(self, seconds: float) -> None:
        """Sleep, at most until shortly after the signal."""
        deadline = time.monotonic() + seconds
        while not self.is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left))

    def _set(self, *_: object) -> None:
        self.is_set = True


def main() -> int:
    """Serve the plan of a state folder until SIGTERM; return the exit status, 3 with a line on the console."""
    join_parent()
    folder = Path(sys.argv[1])
    console.redirect(log_folder(folder) / "deployment.log")
    plan = Plan.read(folder)
    try:
        return _serve(plan, folder)
    except (DeploymentFailed, RayError, RayServeException, ConnectionError, TimeoutError) as error:
        progress = ProgressLines(folder, console)
        progress.look(is_serving=True)
        console.say(f"{' '.join(str(error).split())}; logs: {log_folder(folder)}")
        return DEPLOYMENT_FAILED


def _serve(plan: Plan, folder: Path) -> int:
    """Start Serve, deploy, watch and drain; return the exit status."""
    stop, progress = StopSignal(), ProgressLines(folder, console)
    if not _connect(plan, stop):
        return 0
    stop.listen()
    _link_logs(folder)
    console.say("starting Ray Serve")
    _start_serve(plan)
    if not _wait_until_checked(plan, folder, stop):
        return 0
    _deploy(plan)
    (folder / DEPLOYED).touch()
    console.say(f"loading {', '.join(map(model_of, _ours(plan)))}")
    if not _wait_until_served(plan, stop, progress):
        return 0
    console.say(f"serving at {plan.url} after {time.time() - plan.begun:.0f} s")
    for line in what_to_try(plan, folder):
        console.write(line)
    _watch(plan, stop, progress)
    return _drain(plan)


def _connect(plan: Plan, stop: StopSignal) -> bool:
    """Join the plan's cluster once it is up; return False on SIGTERM."""
    while is_free(plan.ports.cluster):
        if stop.is_set:
            return False
        time.sleep(_POLL_S)
    ray.init(address=f"127.0.0.1:{plan.ports.cluster}", logging_level=logging.WARNING, log_to_driver=False)
    return not stop.is_set


def _link_logs(folder: Path) -> None:
    """Link Ray's own logs into the log folder."""
    node = worker.global_worker.node
    if node is not None:
        with suppress(FileExistsError):
            (log_folder(folder) / "ray").symlink_to(node.get_logs_dir_path())


def _wait_until_checked(plan: Plan, folder: Path, stop: StopSignal) -> bool:
    """Wait for the check of the models; return False on SIGTERM.

    Raises: DeploymentFailed with the fault found.
    """
    deadline = time.monotonic() + plan.start_timeout_s
    while (fault := read_check(folder)) is None and not stop.is_set:
        if time.monotonic() > deadline:
            raise DeploymentFailed("the model was not checked in time")
        time.sleep(_POLL_S)
    if fault:
        raise DeploymentFailed(fault)
    return not stop.is_set


def cause_of(message: str) -> str:
    """Return the last line of a traceback that names an exception, or the whole text."""
    causes = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Failed)\b.*)$", message, re.MULTILINE)
    return causes[-1] if causes else message


def _ours(plan: Plan) -> list[dict[str, Any]]:
    return [one for one in plan.config["applications"] if one["import_path"] == APPLICATION]


def _start_serve(plan: Plan) -> None:
    schema = ServeDeploySchema.model_validate(plan.config)
    serve.start(
        proxy_location=schema.proxy_location,
        http_options=schema.http_options.model_dump(),
        grpc_options=schema.grpc_options.model_dump(),
        logging_config=schema.logging_config,
        controller_options=schema.controller_options,
    )


def _deploy(plan: Plan) -> None:
    client = _get_global_client()
    assert client is not None, "Serve has been started"
    client.deploy_apps(ServeDeploySchema.model_validate(plan.config))


def _wait_until_served(plan: Plan, stop: StopSignal, progress: ProgressLines) -> bool:
    """Wait for every application to run and for its HTTP port to answer; return False on SIGTERM.

    Raises: DeploymentFailed if an application cannot start, or stays unhealthy for `start_timeout_s`.
    """
    names = {application["name"] for application in plan.config["applications"]}
    seen = time.monotonic()
    while not stop.is_set:
        progress.look()
        found = serve.status().applications
        if names == {name for name, application in found.items() if application.status == "RUNNING"} and _answers(plan):
            return True
        if not is_lost(found):
            seen = time.monotonic()
        _check_time(found, since=seen, plan=plan)
        time.sleep(_POLL_S)
    return False


def _watch(plan: Plan, stop: StopSignal, progress: ProgressLines) -> None:
    """Watch the applications and return on SIGTERM.

    Raises: DeploymentFailed if an application has no replica for `start_timeout_s`.
    """
    seen = time.monotonic()
    while not stop.is_set:
        progress.look(is_serving=True)
        found = serve.status().applications
        if all(map(has_replica, found.values())):
            seen = time.monotonic()
        _check_time(found, since=seen, plan=plan)
        stop.wait(_WATCH_S)


def is_lost(found: Mapping[str, ApplicationStatusOverview]) -> bool:
    """Return True if an application is unhealthy: Serve replaces its replica, even one lost during its start.

    Raises: DeploymentFailed if an application could not start.
    """
    for application in found.values():
        if application.status == "DEPLOY_FAILED":
            raise DeploymentFailed(cause_of(_messages(application)))
    return any(application.status == "UNHEALTHY" for application in found.values())


def has_replica(application: ApplicationStatusOverview) -> bool:
    """Return True if every deployment has a running replica; others may then come and go."""
    running = (one.replica_states.get(ReplicaState.RUNNING, 0) for one in application.deployments.values())
    return application.status == "RUNNING" or (bool(application.deployments) and all(running))


def _check_time(found: Mapping[str, ApplicationStatusOverview], *, since: float, plan: Plan) -> None:
    if time.monotonic() - since > plan.start_timeout_s:
        raise DeploymentFailed(cause_of("\n".join(map(_messages, found.values()))))


def _messages(application: ApplicationStatusOverview) -> str:
    return "\n".join([application.message, *(one.message for one in application.deployments.values())])


def _answers(plan: Plan) -> bool:
    """Return True if `/health` of every application answers 200 through the proxy."""
    prefixes = [one.get("route_prefix") or "/" for one in _ours(plan)]
    try:
        for prefix in prefixes:
            _DIRECT.open(f"{plan.url}{prefix.rstrip('/')}/health", timeout=_ANSWER_S).close()
    except (OSError, http.client.HTTPException):  # an error status is an OSError
        return False
    return True


def _drain(plan: Plan) -> int:
    """Reject new requests, wait for open ones up to `drain_timeout_s`, then end the rest with an error.

    Returns: 0, or 4 if a request had to be ended.
    """
    console.say(f"draining for up to {plan.drain_timeout_s:g} s; the next signal stops at once")
    if _wait(lambda: _ask_all(plan, "drain") == 0, plan.drain_timeout_s):
        return 0
    _ask_all(plan, "give_up")
    _wait(lambda: _ask_all(plan, "drain") == 0, _FLUSH_S)
    return UNANSWERED


def _ask_all(plan: Plan, method: str) -> int:
    """Call a method of all our replicas; return the sum of the results, requests in progress.

    A lost replica counts as 0, a replica too busy to answer as 1.
    """
    total = 0
    for application in _ours(plan):
        try:
            answers = serve.get_app_handle(application["name"]).broadcast(method)
            found = answers.results(timeout_s=_ANSWER_S, return_exceptions=True)
        except TimeoutError as error:
            found = [error]
        except _GONE:
            found = []
        total += sum(map(_num_running, found))
    return total


def _num_running(answer: Any) -> int:
    """Return the requests in progress by a replica's result, or by the error in its place."""
    return 1 if isinstance(answer, TimeoutError) else answer if isinstance(answer, int) else 0


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


if __name__ == "__main__":
    sys.exit(main())
