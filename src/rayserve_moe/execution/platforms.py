"""Check and description of the platform that computes, and the threads that compute on CPUs."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import jax

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.parallel.mesh import local_devices

log = logging.getLogger(__name__)
REMEDIES = {
    "cpu": "set JAX_PLATFORMS=cpu",
    "gpu": "install 'rayserve_moe[gpu]' and a driver, or set platform: cpu",
    "tpu": "install 'rayserve_moe[tpu]', or set platform: cpu",
}


def devices_for(count: int, *, wanted: str) -> list[jax.Device]:
    """Return `count` devices of this process as `local_devices`, after `check_platform`.

    Raises: SettingsError also if jax cannot start the platform `wanted`, with jax's reason.
    """
    try:
        devices = local_devices(count)
    except (RuntimeError, AssertionError) as error:  # jax asserts that a platform of JAX_PLATFORMS has a plugin
        if wanted == "auto":
            raise
        reason = next(iter(str(error).splitlines()), "jax has no plugin for it")
        raise SettingsError(f"platform {wanted}: {reason}; {REMEDIES[wanted]}") from error
    check_platform(devices, wanted=wanted)
    return devices


def check_platform(devices: list[jax.Device], *, wanted: str, files: Path = Path("/dev")) -> None:
    """Log in one line which devices compute; a host whose GPUs do not compute is a warning.

    Raises: SettingsError if the devices are not of the platform `wanted`, unless that is `auto`.
    """
    found = devices[0].platform
    if wanted not in ("auto", found):
        raise SettingsError(f"platform {wanted}: jax computes on {platform_in_words(devices)}; {REMEDIES[wanted]}")
    if found == "cpu" and wanted == "auto" and list(files.glob("nvidia[0-9]*")):
        log.warning("the CPU computes, and this host has a GPU: set platform to gpu, or to cpu")
    log.info("computing on %s", platform_in_words(devices))


def platform_in_words(devices: list[jax.Device]) -> str:
    """Return the number, the kind and the platform of devices, such as `1 x NVIDIA H200 (gpu)`."""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


ONE_THREAD_BYTES = 32 * 2**20
"""Checkpoint size below which XLA gets a single thread of a CPU host.

Splitting such short steps over threads costs CPU time and gains nothing.
"""
XLA_THREADS = "PJRT_NPROC"
"""Environment variable of XLA's thread count (at least 1 per device). A value set by the user is kept."""


NICENESS = 5
"""Nice value of compute threads that share cores with servers, so that new requests are handled first."""


def lower_priority() -> None:
    """Give all threads of this process at least the nice value NICENESS. Threads started later inherit it."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def limit_threads(model_path: str | Path) -> None:
    """Limit XLA to a single thread if the checkpoint is small. Call before jax touches a device.

    The limit holds for the process and its children, also when they load larger checkpoints later.
    """
    if open_checkpoint(model_path).num_bytes < ONE_THREAD_BYTES:
        set_environment_defaults({XLA_THREADS: "1"})
