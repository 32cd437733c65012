"""Command `rayserve-moe scale APP N`, checked before Ray is loaded."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from rayserve_moe.config.load import inherited_environment, temporary_folder
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.scaling import check_number
from rayserve_moe.serving.start.state import APPLICATION, running_plans

FAILED = 1
_AUTH_MODE = "RAY_AUTH_MODE"


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
    try:
        check_number(options.replicas)
        address = options.address or dashboard_of(options.application)
    except StartError as error:
        sys.stderr.write(f"rayserve-moe scale: {error}\n")
        return FAILED
    environment = inherited_environment()
    if not environment.get(_AUTH_MODE):
        command = [sys.executable, "-m", "rayserve_moe.cli", "scale", *_arguments(options)]
        os.execve(sys.executable, command, {**environment, _AUTH_MODE: "token"})
    return importlib.import_module("rayserve_moe.serving.start.scale_client").run(options, address=address)


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
