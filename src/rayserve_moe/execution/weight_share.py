"""This host's share of the weights in a file of memory: it stays when this process ends, for the one that follows it.

where the table begins | arrays, each at a multiple of ALIGNMENT | table as JSON: token, arrays with checksums
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.checkpoints.names import walk
from rayserve_moe.checkpoints.open_shares import WeightShare, written_share
from rayserve_moe.checkpoints.parts import region_of, regions_of
from rayserve_moe.checkpoints.pieces import Region
from rayserve_moe.checkpoints.staged import StagedParameter, on_devices
from rayserve_moe.execution.huge_pages import use_huge_pages
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step_types import ModelWeights
from rayserve_moe.execution.weights import parameter_tree
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.model.transformer import Parameters
from rayserve_moe.parallel.mesh import platform_of

ALIGNMENT = 4096
NUMBER_BYTES = 8
Path = tuple[str, str]
"""Of an array: its group, its name."""


class ShareError(RuntimeError):
    """A share that is damaged, or not of the weights that are wanted."""


def write_share(token: str, weights: ModelWeights, *, staged: dict[str, Any]) -> WeightShare:
    """The share of `weights` with the parameters in the tree `staged` in their places. OSError without memory for it.

    Of what several devices of this host hold there is one copy. Where experts lie is part of it.
    """
    with written_share(token) as share:
        entries, end = [], ALIGNMENT
        for path, region, values in _blocks(weights, staged):
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            share.write(raw, end)
            entries.append([path, region, end, zlib.crc32(raw.data)])
            end += -(-len(raw) // ALIGNMENT) * ALIGNMENT
        table = json.dumps({"token": token, "entries": entries}).encode()
        share.write(np.frombuffer(table, np.uint8), end)
        share.write(np.frombuffer(end.to_bytes(NUMBER_BYTES, "little"), np.uint8), 0)
    return share


def read_share(share: WeightShare, served: ServedModel) -> ModelWeights:
    """Copy a share to the devices of this host, laid out as those that it was written from.

    ShareError where it is of other weights than its token says, of other parameters, or damaged.
    """
    held = _Held(np.frombuffer(mmap.mmap(share.fd, 0, prot=mmap.PROT_READ), np.uint8), share.token)
    plan, tree = served.config.plan, parameter_tree(served.config, dtype=served.dtype)
    params: dict[str, Any] = {group: {} for group in tree}
    for (group, name), spec in walk(tree):
        sharding, dtype = plan.sharding(spec.axes), jax.numpy.dtype(spec.dtype)
        regions = regions_of(spec, sharding).items()
        shards = ((held.take((group, name), region, dtype=dtype), devices) for region, devices in regions)
        params[group][name] = on_devices(spec, sharding, shards=shards)
    if platform_of(plan.mesh) == "cpu":
        use_huge_pages(jax.tree.leaves(params))
    maps = {name: held.whole(("maps", name), dtype=np.dtype(np.int32)) for name in held.names("maps")}
    arrays = PlacementArrays(**jax.device_put(maps, plan.replicated())) if maps else None
    return ModelWeights(cast(Parameters, params), arrays)


class _Held:
    """The arrays of a share, out of its bytes: copies, since devices of a CPU may compute on what they are given."""

    def __init__(self, raw: np.ndarray, token: str) -> None:
        self._raw = raw
        try:
            table = json.loads(bytes(raw[int.from_bytes(bytes(raw[:NUMBER_BYTES]), "little") :]))
            found = table["token"]
            self._entries = {(tuple(path), _as_region(region)): rest for path, region, *rest in table["entries"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ShareError("a share of weights is damaged: its table cannot be read") from error
        if found != token:
            raise ShareError(f"a share is of the weights {found}, not of {token}")

    def names(self, group: str) -> list[str]:
        """The arrays of a group."""
        return [path[1] for path, _ in self._entries if path[0] == group]

    def whole(self, path: Path, *, dtype: np.dtype) -> np.ndarray:
        """An array of which there is one shard."""
        return self.take(path, next(region for found, region in self._entries if found == path), dtype=dtype)

    def take(self, path: Path, region: Region, *, dtype: np.dtype) -> np.ndarray:
        """A copy of a shard."""
        shape = tuple(stop - start for start, stop in region)
        if (path, region) not in self._entries:
            raise ShareError(f"a share has no part {region} of {'.'.join(path)}")
        offset, checksum = self._entries[path, region]
        raw = self._raw[offset : offset + math.prod(shape) * dtype.itemsize].copy()
        if len(raw) != math.prod(shape) * dtype.itemsize or zlib.crc32(raw.data) != checksum:
            raise ShareError(f"a share of weights is damaged in {'.'.join(path)}")
        return raw.view(dtype).reshape(shape)


def _blocks(weights: ModelWeights, staged: dict[str, Any]) -> Iterator[tuple[Path, Region, np.ndarray]]:
    """All shards of this host, each once: with its path, where it lies in its array, and its values."""
    for group, parameters in cast(dict[str, Any], weights.params).items():
        for name, serving in parameters.items():
            for region, values in _shards_of(staged.get(group, {}).get(name, serving)).items():
                yield (group, name), region, values
    for name, array in vars(weights.maps).items() if weights.maps is not None else ():
        for region, values in _shards_of(array).items():
            yield ("maps", name), region, values


def _shards_of(array: jax.Array | StagedParameter) -> dict[Region, np.ndarray]:
    if not isinstance(array, StagedParameter):
        return {region_of(each.index, array.shape): np.asarray(each.data) for each in array.addressable_shards}
    indices = array.sharding.addressable_devices_indices_map(array.spec.shape)
    return {region_of(indices[devices[0]] or (), array.spec.shape): values for values, devices in array.shards}


def _as_region(bounds: list[list[int]]) -> Region:
    return tuple((start, stop) for start, stop in bounds)
