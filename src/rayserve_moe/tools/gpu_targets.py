"""GPUs that programs are compiled for on a machine without one: their properties, and the devices of a topology.

It takes the plugin of jax for GPUs (`jax-cuda13-plugin` and `jax-cuda13-pjrt`), and no driver. A topology is a card and
a number of them on one machine, such as `h200:1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental import topologies

from rayserve_moe.execution.programs.buckets import GPUS

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
FILES = Path(__file__).parent / "gpu_cards"
MEMORY_SHARE = 0.92
"""Share of a card's memory that programs may take (`XLA_PYTHON_CLIENT_MEM_FRACTION`); XLA and the driver take some."""


class GpuTargetError(ValueError):
    """A GPU that programs cannot be compiled for here."""


@dataclass(frozen=True)
class GpuTarget:
    """A card as published by NVIDIA, on which `FILES` has what the compiler asks."""

    memory_bytes: int

    @property
    def limit_bytes(self) -> int:
        """Return the bytes that programs may take."""
        return int(self.memory_bytes * MEMORY_SHARE)


GPU_TARGETS = {"h100": GpuTarget(80 << 30), "h200": GpuTarget(141_000_000_000)}


def is_gpu(topology: str) -> bool:
    """Return True if a topology is one of GPUs."""
    return topology.split(":")[0].lower() in GPU_TARGETS


def limit_of(topology: str) -> int:
    """Return the bytes of a GPU that programs may take."""
    return GPU_TARGETS[topology.split(":")[0].lower()].limit_bytes


def bandwidth_of(topology: str) -> float:
    """Return the published bytes per second of the memory of a GPU."""
    return GPUS[topology.split(":")[0].upper()].bytes_per_s


def is_available() -> bool:
    """Return True if the plugin of jax for GPUs is installed."""
    return any(find_spec(name) for name in PLUGINS)


@cache
def gpu_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a topology such as `h200:2`, which need not exist.

    Raises: GpuTargetError for another syntax, without the plugin, and with the compiler's reason.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d?)", topology.lower())
    if found is None:
        raise GpuTargetError(f"topology {topology}: write a card and a number of them, such as h200:1")
    if not is_available():
        raise GpuTargetError(
            f"topology {topology}: jax has no plugin for GPUs here; pip install 'rayserve_moe[gpu-compiler]'"
        )
    name, count = found.groups()
    config = (FILES / f"{name}.txtpb").read_text(encoding="utf-8")
    try:
        described = topologies.get_topology_desc(name, platform="cuda", target_config=config, topology=f"1x1x{count}")
        return list(described.devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise GpuTargetError(f"topology {topology}: {str(error).strip().splitlines()[0]}") from error
