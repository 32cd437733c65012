"""The rollout job handed to a Ray cluster's job server by the documented command; reports as JSON on standard output.

    python -m tests.cluster.rollout_submission DIRECTORY COMMAND

DIRECTORY is where the command is typed, and the user's home. A program of its own: a process has one Ray session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.support.cluster.ports import free_port

LONGEST_S = 600


def main() -> None:
    """Start a cluster with its dashboard, submit, wait, report."""
    directory, command = Path(sys.argv[1]).resolve(), sys.argv[2]
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    # The job's `python` is looked up in the path that the cluster was started with, not in that of the command.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, **ports})
    environment = {"HOME": str(directory), "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard_port']}"}
    submitted = submit(command, directory, environment=os.environ | environment)
    cluster.shutdown()
    sys.stdout.write(json.dumps({"status": submitted.returncode, "log": submitted.stdout[-8000:]}) + "\n")


def submit(command: str, directory: Path, *, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Submit once the agent is up that runs jobs: it comes after the dashboard."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        done = subprocess.run(
            ["bash", "-c", command],
            check=False,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if "No available agent" not in done.stdout or time.monotonic() > deadline:
            return done
        time.sleep(1.0)


if __name__ == "__main__":
    main()
