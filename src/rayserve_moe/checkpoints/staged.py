"""Parameters whose shards are in host memory, and their transfer to devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from rayserve_moe.model.param_spec import ParamSpec


@dataclass(frozen=True)
class StagedParameter:
    """A parameter in host memory: its shards for the devices of this host."""

    spec: ParamSpec
    sharding: jax.sharding.Sharding
    shards: tuple[tuple[np.ndarray, list[jax.Device]], ...]

    def on_devices(self) -> jax.Array:
        """Copy the parameter to its devices."""
        return on_devices(self.spec, self.sharding, shards=self.shards)


def on_devices(
    spec: ParamSpec, sharding: jax.sharding.Sharding, *, shards: Iterable[tuple[np.ndarray, list[jax.Device]]]
) -> jax.Array:
    """Return an array built from this host's shards in host memory, each with the devices that hold it."""
    held: list[jax.Array] = []
    for values, devices in shards:
        # Wait for the copies, so that the next region is read only when this one is off the host.
        held += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, held, dtype=jax.numpy.dtype(spec.dtype))
