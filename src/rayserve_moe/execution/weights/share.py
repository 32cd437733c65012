"""This host's share of the weights in a memory file, which outlives the process for its successor.

offset of the table | arrays, each at a multiple of ALIGNMENT | table as JSON: token, arrays with checksums
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement
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


def write_share(
    token: str, weights: ModelWeights, *, staged: dict[str, Any], by_slot: Collection[tuple[str, ...]] = ()
) -> WeightShare:
    """Write the share of `weights`, with parameters of the tree `staged` in place of current ones.

    Data on several devices of this host is written once. The placement of experts is included. Parameters `by_slot`
    have a checksum for each layer and slot, so that a host can read some of their experts.

    Raises: OSError without memory for it.
    """
    with written_share(token) as share:
        entries, end = [], ALIGNMENT
        for path, region, values in _blocks(weights, staged):
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            share.write(raw, end)
            num_parts = math.prod(values.shape[:2]) if path in by_slot else 1
            entries.append([path, region, end, [zlib.crc32(part.data) for part in raw.reshape(num_parts, -1)]])
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

    The vocabulary moves to other devices; experts lie as `served.placement` says. If several shares have the same data,
    the first is read. Of a share's experts, only those that belong here are read.

    Raises: ShareError if a share is damaged, or parameters are missing.
    """
    held, placement = [_Held(share) for share in shares], served.placement
    before_MP = _experts_before(held[0], placement)

    def read(path: Path, spec: ParamSpec, regions: list[Region]) -> list[np.ndarray]:
        if spec.layout:
            raise ShareError(f"{'.'.join(path)} is packed for the kernels of one device, and cannot be cut")
        if not spec.num_experts:
            return _gathered(held, path, spec=spec, regions=regions)
        wanted = [placement.expert_of_slot[:, slice(*region[1])] for region in regions]
        return [
            _gathered_experts(held, path, spec=spec, region=region, experts_MP=(experts_MP, before_MP))
            for region, experts_MP in zip(regions, wanted, strict=True)
        ]

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


def _experts_before(held: _Held, placement: ExpertPlacement) -> np.ndarray:
    """Return the expert of each slot when the shares were written, int [M, P]; without maps it is the slot's number."""
    if not held.names("maps"):
        num_layers, num_experts = placement.num_layers, placement.num_experts
        return np.broadcast_to(np.arange(num_experts), (num_layers, num_experts))
    experts_MP = held.whole(("maps", "bounds_LP"), "int32") // WHOLE
    before_MP = np.empty_like(experts_MP)
    np.put_along_axis(before_MP, held.whole(("maps", "slots_LP"), "int32"), experts_MP, axis=1)
    return before_MP


def _gathered(shares: list[_Held], path: Path, *, spec: ParamSpec, regions: list[Region]) -> list[np.ndarray]:
    """Return the values of a parameter's regions, gathered from the overlapping shards. Padding is zero in both."""
    blocks = [_empty(spec, region) for region in regions]
    seen = set[Region]()
    for held, found in ((each, found) for each in shares for found in each.regions(path)):
        cuts = [] if found in seen else [_cut(found, region) for region in regions]
        seen.add(found)
        values = held.take(path, found, dtype=spec.dtype) if any(cuts) else np.empty(0)
        for block, (to, taken) in ((block, cut) for block, cut in zip(blocks, cuts, strict=False) if cut):
            block[to] = values[taken]
    min_values = math.prod((len(spec.layers) or 1, *spec.filled_shape))
    if sum(math.prod(stop - start for start, stop in each) for each in seen) < min_values:
        raise ShareError(f"no share has all of {'.'.join(path)}")
    return blocks


def _gathered_experts(
    shares: list[_Held], path: Path, *, spec: ParamSpec, region: Region, experts_MP: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return the values of a region of expert slots, each expert from the first share that has it.

    `experts_MP` are the experts of the region's slots, and those of all slots when the shares were written.
    """
    block, (wanted_MS, before_MP) = _empty(spec, region), experts_MP
    is_missing_MS = np.ones(wanted_MS.shape, np.bool_)
    for held, found in ((each, found) for each in shares for found in each.regions(path)):
        is_same_MSF = wanted_MS[:, :, None] == before_MP[:, None, slice(*found[1])]
        layers, slots = np.nonzero(is_missing_MS & is_same_MSF.any(axis=2))
        if len(layers):
            at = layers, is_same_MSF[layers, slots].argmax(axis=1)
            block[layers, slots] = held.take_slots(path, found, at=at, dtype=spec.dtype)
            is_missing_MS[layers, slots] = False
    if is_missing_MS.any():
        raise ShareError(f"no share has all of {'.'.join(path)}")
    return block


def _empty(spec: ParamSpec, region: Region) -> np.ndarray:
    return np.zeros([stop - start for start, stop in region], jax.numpy.dtype(spec.dtype))


def _cut(found: Region, region: Region) -> tuple[Any, Any] | None:
    """Return the overlap of a shard and a region, as indices in the region and in the shard; None without overlap."""
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
        offset, checksums, shape = self._entry(path, region)
        num_bytes = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
        raw = self._share.read(offset, offset + num_bytes)
        is_whole = len(raw) == num_bytes
        self._check(path, checksums, raw.reshape(len(checksums), -1) if is_whole else [raw[:0]] * len(checksums))
        return raw.view(jax.numpy.dtype(dtype)).reshape(shape)

    def take_slots(self, path: Path, region: Region, *, at: tuple[np.ndarray, np.ndarray], dtype: str) -> np.ndarray:
        """Return copies [N, ...] of the experts of a shard at N layers and slots within it; only they are read."""
        offset, checksums, shape = self._entry(path, region)
        if len(checksums) == 1:
            return self.take(path, region, dtype=dtype)[at]
        num_bytes = math.prod(shape[2:]) * jax.numpy.dtype(dtype).itemsize
        numbers = np.ravel_multi_index(at, shape[:2]).tolist()
        parts = [self._share.read(offset + i * num_bytes, offset + (i + 1) * num_bytes) for i in numbers]
        self._check(path, [checksums[i] for i in numbers], parts)
        return np.stack(parts).view(jax.numpy.dtype(dtype)).reshape(-1, *shape[2:])

    def _entry(self, path: Path, region: Region) -> tuple[int, list[int], tuple[int, ...]]:
        """Return the offset of a shard, the checksums of its equal parts, and its shape."""
        if (path, region) not in self._entries:
            raise ShareError(f"a share has no part {region} of {'.'.join(path)}")
        offset, checksums = self._entries[path, region]
        return offset, checksums, tuple(stop - start for start, stop in region)

    def _check(self, path: Path, checksums: Sequence[int], parts: Iterable[np.ndarray]) -> None:
        if any(zlib.crc32(part.data) != checksum for part, checksum in zip(parts, checksums, strict=True)):
            raise ShareError(f"a share of weights is damaged in {'.'.join(path)}")


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
