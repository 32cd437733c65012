"""Groups of processes without a replica: the first of them is the coordinator too."""

from __future__ import annotations

import jax


def join_hosts(coordinator: str, *, num_hosts: int, host_id: int) -> None:
    """Enter the group of `num_hosts` processes led by `coordinator` (host:port); call before using a device."""
    jax.distributed.initialize(
        coordinator, num_hosts, host_id, heartbeat_timeout_seconds=100, initialization_timeout=120
    )


def leave_hosts() -> None:
    """Leave the group, so that the coordinator does not report this process as lost."""
    jax.distributed.shutdown()
