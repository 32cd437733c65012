"""Host memory for copies of weights that are sent: staged, and kept of what serves and of what served before."""

from __future__ import annotations

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.memory import bytes_on_device, memory_available, rounded_down
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.parallel.mesh import platform_of


def pages_beside_copies(served: ServedModel, num_pages: int, *, num_copies: int, share_bytes: int) -> int:
    """KV pages of a data rank, up to `num_pages`, that leave host memory for `num_copies` of this host's share.

    The weights are loaded. SettingsError where memory does not hold as many copies, beside the pages on a CPU. Other
    hosts of this machine are not looked at.
    """
    if num_copies <= 0:
        return num_pages
    mesh, available = served.config.plan.mesh, memory_available()
    devices, free = list(mesh.local_devices), available - num_copies * share_bytes
    is_cpu, pool = platform_of(mesh) == "cpu", 0
    if is_cpu and free > 0:
        num_pages = min(num_pages, served.num_pages_within(rounded_down(free // len(devices))))
        is_asked = served.pool.cache.num_pages > 0
        pool = bytes_on_device(served.state(num_pages)) * len(devices) if is_asked else 0
    if pool > free:
        raise SettingsError(
            f"keep_sent_weights: {num_copies} copies of {share_bytes} bytes do not fit into {available} bytes of host "
            f"memory{f' beside {pool} bytes of KV pages' if pool else ''}: take auto, which keeps what fits, or off"
        )
    return num_pages
