"""Process that runs the Ray cluster of a start, like `ray start --head --block`.

python -m rayserve_moe.serving.start.cluster STATE_FOLDER
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.scripts.scripts import start

from rayserve_moe.serving.start.fork_server import write_worker_launcher
from rayserve_moe.serving.start.ports import Ports
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import DEPLOYED, Plan

LATEST_DASHBOARD_S = 30.0
"""Time after which the dashboard starts even if nothing is deployed."""
POLL_S = 0.1


def main() -> None:
    """Start Ray on the ports of a plan; return only by an exception."""
    join_parent()
    folder = Path(sys.argv[1])
    Node.start_api_server = _later(Node.start_api_server, folder / DEPLOYED)
    start.main(args=options_of(Plan.read(folder).ports), prog_name="ray start")


def options_of(ports: Ports) -> list[str]:
    """Return the options of `ray start`; a port of 0 is chosen by each process."""
    numbers = {
        "port": ports.cluster,
        "dashboard-port": ports.dashboard,
        "node-manager-port": 0,
        "object-manager-port": 0,
        "dashboard-agent-listen-port": 0,
        "dashboard-agent-grpc-port": 0,
        "runtime-env-agent-port": 0,
        "metrics-export-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    return ["--head", "--block", "--dashboard-host=127.0.0.1", *(f"--{name}={port}" for name, port in numbers.items())]


def adapt(parameters: RayParams, _: bool) -> None:
    """Set up forked workers (see `fork_server`), without the autoscaler monitor and the server for remote drivers.

    Ray calls it in the process of `main`; a single machine needs neither of the omitted processes.
    """
    parameters.setup_worker_path = str(write_worker_launcher(Path(sys.argv[1])))
    parameters.no_monitor = True
    parameters.ray_client_server_port = None


def _later(start_dashboard: Any, deployed: Path) -> Any:
    """Return a replacement of the node's method that starts the dashboard: on a thread, once the config is deployed.

    Neither the raylet nor Serve waits for the dashboard, and until then both cores are busy.
    """

    def start_api_server(node: Node, **options: Any) -> None:
        node._webui_url = f"127.0.0.1:{node._ray_params.dashboard_port}"

        def run() -> None:
            deadline = time.monotonic() + LATEST_DASHBOARD_S
            while not deployed.exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            start_dashboard(node, **options)
            threading.Event().wait()  # the dashboard ends with the thread that started it

        threading.Thread(target=run, name="dashboard", daemon=True).start()

    return start_api_server


if __name__ == "__main__":
    main()
