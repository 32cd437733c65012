"""The group of processes that hosts form, and the service by which they find each other."""

from __future__ import annotations

from jax._src import distributed
from jax._src.lib import _jax

HEARTBEAT_TIMEOUT_S = 100
"""Hosts that do not answer are found elsewhere, and much sooner."""
JOIN_TIMEOUT_S = 120
SHUTDOWN_TIMEOUT_S = 1


class Coordinator:
    """The service of one group, in a process that belongs to none: where a member has it, all end with that member.

    Members outlive each other, and end when this process does.
    """

    def __init__(self, port: int, *, num_hosts: int) -> None:
        self._service = _jax.get_distributed_runtime_service(
            f"[::]:{port}",
            num_hosts,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            cluster_register_timeout=JOIN_TIMEOUT_S,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            recoverable=True,
        )

    def shutdown(self) -> None:
        """Stop; the members have ended before."""
        self._service.shutdown()


def join_hosts(coordinator: str, *, num_hosts: int, host_id: int) -> None:
    """Enter the group whose `Coordinator` is at `coordinator` (host:port); call before using a device.

    As `jax.distributed.initialize`, which would have the first member start the service.
    """
    client = _jax.get_distributed_runtime_client(
        coordinator,
        host_id,
        init_timeout=JOIN_TIMEOUT_S,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.coordinator_address, state.num_processes, state.process_id = coordinator, num_hosts, host_id
    state.client = client
