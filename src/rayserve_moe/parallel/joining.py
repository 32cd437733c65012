"""The group of JAX processes of several hosts, and the service by which they find each other."""

from __future__ import annotations

from jax._src import distributed
from jax._src.lib import _jax

HEARTBEAT_TIMEOUT_S = 100
"""Hosts that do not answer are detected elsewhere, and much sooner."""
JOIN_TIMEOUT_S = 120
SHUTDOWN_TIMEOUT_S = 1


class Coordinator:
    """The coordination service of a group, in a process outside the group.

    If a member ran the service, all members would end with that member. Here they outlive each other, and end with this
    process.
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
        """Stop the service; the members have ended before."""
        self._service.shutdown()


def join_hosts(coordinator: str, *, num_hosts: int, host_id: int) -> None:
    """Join the group whose `Coordinator` is at `coordinator` (host:port). Call before using a device.

    Replaces `jax.distributed.initialize`, in which the first member would start the service.
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
