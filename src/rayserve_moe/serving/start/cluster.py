"""The process that runs the Ray cluster of a start, as `ray start --head --block` does.

python -m rayserve_moe.serving.start.cluster STATE_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.scripts.scripts import start

from rayserve_moe.serving.start.ports import Ports
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import Plan


def main() -> None:
    """Start Ray on the ports of a plan; returns only with an exception."""
    join_parent()
    start.main(args=options_of(Plan.read(Path(sys.argv[1])).ports), prog_name="ray start")


def options_of(ports: Ports) -> list[str]:
    """Return the options of `ray start`; each process chooses a port that is 0."""
    numbers = {
        "port": ports.cluster,
        "ray-client-server-port": ports.client,
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


if __name__ == "__main__":
    main()
