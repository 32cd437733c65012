"""The rollout job handed to a Ray cluster's job server, told as JSON on standard output.

    python -m tests.cluster.rollout_submission DIRECTORY

DIRECTORY has `prompts.jsonl` and `config.yaml`. It is the job's working directory, which Ray copies; the shards go to
`out` in the original. A program of its own: a process has one Ray session.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.support.ports import free_port

LONGEST_S = 300


def main() -> None:
    """Start a cluster with its dashboard, submit, wait, report."""
    directory = Path(sys.argv[1]).resolve()
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, **ports})
    client = JobSubmissionClient(f"http://127.0.0.1:{ports['dashboard_port']}")
    command = [sys.executable, "-m", "rayserve_moe.rollouts.batch_job", "--prompts", "prompts.jsonl"]
    command += ["--out", str(directory / "out"), "--n", "2", "--max-new-tokens", "8", "--config", "config.yaml"]
    deadline = time.monotonic() + LONGEST_S
    job = submit(client, shlex.join(command), directory, deadline)
    while not (status := client.get_job_status(job)).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.5)
    report = {"succeeded": status == JobStatus.SUCCEEDED, "log": client.get_job_logs(job)[-4000:]}
    cluster.shutdown()
    sys.stdout.write(json.dumps(report) + "\n")


def submit(client: JobSubmissionClient, command: str, directory: Path, deadline: float) -> str:
    """Submit once the agent is up that runs jobs: it comes after the dashboard."""
    environment = {"working_dir": str(directory), "excludes": ["out"]}
    while True:
        try:
            return client.submit_job(entrypoint=command, runtime_env=environment)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(1.0)


if __name__ == "__main__":
    main()
