"""This host's share of the weights in a memory file, which outlives the process for its successor.

offset of the table | arrays, each at a multiple of ALIGNMENT | table as JSON: token, arrays with checksums
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.checkpoints.names import walk
from rayserve_moe.checkpoints.open_shares import AnyShare, WeightShare, written_share
from rayserve_moe.checkpoints.parts import region_of, regions_of
from rayserve_moe.checkpoints.pieces import Region
from rayserve_moe.checkpoints.staged import StagedParameter, on_devices
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.huge_pages import use_huge_pages
from rayserve_moe.execution.weights.placing import maps_on_devices, parameter_tree
from rayserve_moe.experts.slot_mapping import WHOLE, PlacementArrays
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.transformer import Parameters
from rayserve_moe.parallel.mesh import platform_of

ALIGNMENT = 4096
NUMBER_BYTES = 8
Path = tuple[str, str]
"""Group and name of an array."""


class ShareError(RuntimeError):
    """Raised for a share that is damaged or of other weights."""


def write_share(token: str, weights: ModelWeights, *, staged: dict[str, Any]) -> WeightShare:
    """Write the share of `weights`, with parameters of the tree `staged` in place of current ones.

    Data on several devices of this host is written once. The placement of experts is included.

    Raises: OSError without memory for it.
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
    """Copy a share to the devices of this host, with the layout that it was written from.

    Raises: ShareError if it is damaged, or of other weights or parameters.
    """
    held = _Held(share)
    params = _laid_out(
        served, lambda path, spec, regions: [held.take(path, each, dtype=spec.dtype) for each in regions]
    )
    maps = {name: held.whole(("maps", name), "int32") for name in held.names("maps")}
    arrays = PlacementArrays(**jax.device_put(maps, served.config.plan.replicated())) if maps else None
    return ModelWeights(params, arrays)


def read_spread(shares: Sequence[AnyShare], served: ServedModel) -> ModelWeights:
    """Copy this host's part of the shares of a group of another size to its devices.

    Experts and the vocabulary move to other devices; experts get their initial placement. If several shares have the
    same data, the first is read.

    Raises: ShareError if a share is damaged, or parameters are missing.
    """
    held, placement = [_Held(share) for share in shares], served.placement
    slots_MP = _slots_before(held[0], placement.expert_of_slot)

    def read(path: Path, spec: ParamSpec, regions: list[Region]) -> list[np.ndarray]:
        slots = slots_MP if spec.num_experts else None
        return _gathered(held, path, spec=spec, regions=regions, slots_MP=slots)

    params = _laid_out(served, read)
    return ModelWeights(params, maps_on_devices(placement, served.config.plan, may_change=served.moves_experts))


def _laid_out(served: ServedModel, read: Callable[[Path, ParamSpec, list[Region]], Iterable[np.ndarray]]) -> Parameters:
    """Return all parameters on the devices of this host; `read` returns the values of regions."""
    plan, params = served.config.plan, dict[str, dict[str, jax.Array]]()
    for (group, name), spec in walk(parameter_tree(served.config, dtype=served.dtype)):
        sharding = plan.sharding(spec.axes)
        regions = regions_of(spec, sharding)
        shards = zip(read((group, name), spec, list(regions)), regions.values(), strict=True)
        params.setdefault(group, {})[name] = on_devices(spec, sharding, shards=shards)
    if platform_of(plan.mesh) == "cpu":
        use_huge_pages(jax.tree.leaves(params))
    return params


def _slots_before(held: _Held, expert_of_slot_MP: np.ndarray) -> np.ndarray:
    """Return the slot of each slot's expert when the shares were written (the first of several), int [M, P]."""
    if not held.names("maps"):
        return expert_of_slot_MP
    experts_MP, slots_MP = (
        held.whole(("maps", "bounds_LP"), "int32") // WHOLE,
        held.whole(("maps", "slots_LP"), "int32"),
    )
    layers = zip(experts_MP, slots_MP, expert_of_slot_MP, strict=True)
    return np.stack([slots[np.searchsorted(experts, wanted)] for experts, slots, wanted in layers])


def _gathered(
    shares: list[_Held], path: Path, *, spec: ParamSpec, regions: list[Region], slots_MP: np.ndarray | None
) -> list[np.ndarray]:
    """Return the values of a parameter's regions, gathered from the overlapping shards. Padding is zero in both."""
    if spec.layout:
        raise ShareError(f"{'.'.join(path)} is packed for the kernels of one device, and cannot be cut")
    blocks = [np.zeros([stop - start for start, stop in region], jax.numpy.dtype(spec.dtype)) for region in regions]
    seen = set[Region]()
    for held, found in ((each, found) for each in shares for found in each.regions(path)):
        cuts = [] if found in seen else [_cut(found, region, slots_MP=slots_MP) for region in regions]
        seen.add(found)
        values = held.take(path, found, dtype=spec.dtype) if any(cuts) else np.empty(0)
        for block, (to, taken) in ((block, cut) for block, cut in zip(blocks, cuts, strict=False) if cut):
            block[to] = values[taken]
    min_values = math.prod((len(spec.layers) or 1, spec.num_experts or 1, *spec.filled_shape))
    if sum(math.prod(stop - start for start, stop in each) for each in seen) < min_values:
        raise ShareError(f"no share has all of {'.'.join(path)}")
    return blocks


def _cut(found: Region, region: Region, *, slots_MP: np.ndarray | None) -> tuple[Any, Any] | None:
    """Return the overlap of a shard and a region, as indices in the region and in the shard; None without overlap.

    Both contain all layers.
    """
    if slots_MP is not None:
        (first, stop), at_MP = found[1], slots_MP[:, slice(*region[1])]
        layers, slots = np.nonzero((at_MP >= first) & (at_MP < stop))
        return ((layers, slots), (layers, at_MP[layers, slots] - first)) if len(layers) else None
    both = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(found, region, strict=True)]
    return (_within(both, region), _within(both, found)) if all(start < stop for start, stop in both) else None


def _within(part: Iterable[tuple[int, int]], region: Region) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, region, strict=True))


class _Held:
    """Arrays read from the bytes of a share. They are copies, since CPU devices may compute on the given memory.

    Raises: ShareError if it is damaged, or of other weights than its token.
    """

    def __init__(self, share: AnyShare) -> None:
        self._share = share
        try:
            begin = int.from_bytes(bytes(share.read(0, NUMBER_BYTES)), "little")
            table = json.loads(bytes(share.read(begin, max(begin, share.num_bytes))))
            found = table["token"]
            self._entries = {(tuple(path), _as_region(region)): rest for path, region, *rest in table["entries"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ShareError("a share of weights is damaged: its table cannot be read") from error
        if found != share.token:
            raise ShareError(f"a share is of the weights {found}, not of {share.token}")

    def names(self, group: str) -> list[str]:
        """Return the names of the arrays of a group."""
        return [path[1] for path, _ in self._entries if path[0] == group]

    def regions(self, path: Path) -> list[Region]:
        """Return the regions of the shards of an array."""
        return [region for found, region in self._entries if found == path]

    def whole(self, path: Path, dtype: str) -> np.ndarray:
        """Return an array with a single shard."""
        return self.take(path, self.regions(path)[0], dtype=dtype)

    def take(self, path: Path, region: Region, *, dtype: str) -> np.ndarray:
        """Return a copy of a shard."""
        shape = tuple(stop - start for start, stop in region)
        if (path, region) not in self._entries:
            raise ShareError(f"a share has no part {region} of {'.'.join(path)}")
        offset, checksum = self._entries[path, region]
        num_bytes = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
        raw = self._share.read(offset, offset + num_bytes)
        if len(raw) != num_bytes or zlib.crc32(raw.data) != checksum:
            raise ShareError(f"a share of weights is damaged in {'.'.join(path)}")
        return raw.view(jax.numpy.dtype(dtype)).reshape(shape)


def _blocks(weights: ModelWeights, staged: dict[str, Any]) -> Iterator[tuple[Path, Region, np.ndarray]]:
    """Yield all shards of this host, each once: path, region in its array, values."""
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
