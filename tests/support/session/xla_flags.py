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
SHARED: Options = {**QUICK, "xla_backend_optimization_level": 1}
"""Options for engines that many tests share. Compiling takes nearly twice as long as with `QUICK`, a step a third."""
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


def user_flags() -> str:
    """Return the flags of XLA_FLAGS that the tests did not set, such as those of `make test CPU=avx2`."""
    ours = {DEVICES, *QUICK_FLAGS.split()}
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in ours)


def process_flags(*, is_quick: bool = True) -> str:
    """Return XLA_FLAGS of a test process with eight devices: the user's flags, then ours, which win."""
    return " ".join(filter(None, (user_flags(), DEVICES, QUICK_FLAGS if is_quick else "")))


def flags_of_children() -> str:
    """Return XLA_FLAGS for a process with devices of its own, which compiles as this process does."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if flag != DEVICES)


def compiled_once(directory: Path) -> dict[str, str]:
    """Return an environment in which processes of a run, and their children, share what XLA has compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
