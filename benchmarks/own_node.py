"""Another raylet of a cluster whose head listens on loopback alone, which `ray start` refuses.

python -m benchmarks.own_node GCS_ADDRESS NUM_CPUS
"""

from __future__ import annotations

import signal
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams


def main() -> None:
    """Join, and run until a signal ends the process."""
    address, num_cpus = sys.argv[1:]
    ports = {"min_worker_port": 0, "max_worker_port": 0}
    host = address.partition(":")[0]
    Node(RayParams(gcs_address=address, node_ip_address=host, num_cpus=int(num_cpus), **ports), head=False)
    signal.pause()


if __name__ == "__main__":
    main()
