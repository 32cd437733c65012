"""Memory that a served model takes on a device, held against what the device has before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.memory import NoPagesError, bytes_on_device, memory_total, rounded_down, spare_bytes
from rayserve_moe.execution.served_model import ServedModel, beside_weights
from rayserve_moe.parallel.mesh import platform_of

GB = 1e9


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a device."""

    weights_bytes: int
    staging_bytes: int
    """Area for experts that move, and resident adapters."""
    num_pages: int
    """KV pages of a data rank; 0 if no two pages fit."""
    state_bytes: int
    """KV pages, states of recurrent layers and rows; 0 without pages."""
    free_bytes: int
    """Free before anything is loaded."""

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.staging_bytes + self.state_bytes


def memory_plan(served: ServedModel, *, free: int) -> MemoryPlan:
    """Return the memory of a model on a device with `free` bytes.

    Raises: SettingsError if the kernels cannot address the pages that are set.
    """
    weights, staging = bytes_on_device(served.weights), bytes_on_device(beside_weights(served))
    left = max(0, free - weights - staging)
    if platform_of(served.config.plan.mesh) == "cpu":
        left = rounded_down(left)
    try:
        num_pages = served.num_pages_within(left)
    except NoPagesError:
        return MemoryPlan(weights, staging, 0, 0, free)
    return MemoryPlan(weights, staging, num_pages, bytes_on_device(served.state(num_pages)), free)


def check_memory(served: ServedModel, devices: list[jax.Device]) -> None:
    """Check before anything is read that this host's devices hold the weights, and the configured number of pages.

    Raises: SettingsError with the sizes, and with what fits.
    """
    weights, total = bytes_on_device(served.weights), total_bytes(devices)
    if weights > total:
        raise SettingsError(
            f"the weights take {_gb(weights)} of a device, which has {_gb(total)} in all{_remedy(devices)}"
        )
    if served.settings.cache.num_pages:
        plan = memory_plan(served, free=spare_bytes(devices))
        if plan.needed_bytes > plan.free_bytes:
            raise SettingsError(_too_many_pages(served, plan))


def total_bytes(devices: list[jax.Device]) -> int:
    """Return the memory of the smallest local device; emulated devices share the host's memory."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        return min(one["bytes_limit"] for one in stats if one)
    return memory_total() // len(devices)


def _too_many_pages(served: ServedModel, plan: MemoryPlan) -> str:
    held = plan.weights_bytes + plan.staging_bytes
    message = (
        f"num_pages {plan.num_pages} takes {_gb(plan.state_bytes)} beside {_gb(held)} of weights, and "
        f"{_gb(plan.free_bytes)} of a device are free"
    )
    num_fitting = _num_fitting(served, plan.free_bytes - held, too_many=plan.num_pages)
    return f"{message}: at most {num_fitting} pages fit" if num_fitting > 1 else f"{message}: no pages fit"


def _num_fitting(served: ServedModel, free: int, *, too_many: int) -> int:
    """Return the largest number of pages whose state takes at most `free` bytes."""
    fitting = 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if bytes_on_device(served.state(middle)) <= free:
            fitting = middle
        else:
            too_many = middle
    return fitting


def _remedy(devices: list[jax.Device]) -> str:
    return "" if devices[0].platform == "cpu" else ": spread the model over more devices"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.1f} GB"
