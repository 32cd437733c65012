"""Check of the platform that computes against the requested one, and its line in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from rayserve_moe.config.settings import SettingsError

log = logging.getLogger(__name__)
REMEDIES = {
    "cpu": "set JAX_PLATFORMS=cpu",
    "gpu": "install 'rayserve_moe[gpu]' and a driver, or set platform: cpu",
    "tpu": "install 'rayserve_moe[tpu]', or set platform: cpu",
}


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
