"""How XLA compiles for the CPU in tests: quickly, or as it does for users, which takes six times as long."""

from __future__ import annotations

import os
from pathlib import Path

Options = dict[str, str | bool | int]

DEVICES = "--xla_force_host_platform_device_count=8"
QUICK: Options = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
OPTIMIZED: Options = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""What XLA does unasked, for single programs where the environment asks for `QUICK`."""
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


def flags_of_children() -> str:
    """XLA_FLAGS for a process that has its own devices, not those that this one emulates: compiling is as here."""
    return os.environ["XLA_FLAGS"].removeprefix(DEVICES).strip()


def compiled_once(directory: Path) -> dict[str, str]:
    """Environment in which processes of a run, and their children, take from each other what XLA has compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
