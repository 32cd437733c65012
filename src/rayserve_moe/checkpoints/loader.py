"""Load parameters onto devices: every host reads only the slices that its own devices hold.

Host memory stays at about one device's shard of one parameter, and KEPT_BYTES: shards are read, copied to the device
and dropped in turn. What several devices of a host hold, such as an expert with replicas, is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, tensor_name, verify, walk
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.model.param_spec import ParamSpec

KEPT_BYTES = 4 << 30
"""Most bytes kept for later devices; beyond that a slice is read again, most likely from the page cache."""

INFINITIES = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80, 0xFF80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00, 0xFC00),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000, 0xFF800000),
}
"""By dtype: its bits as signed and as unsigned integers, and those of plus and of minus infinity.

Signed, the largest is the largest positive value; unsigned, the largest negative one. NaNs lie beyond the infinities.
"""

Range = tuple[int, int]
Region = tuple[Range, ...]
Piece = tuple[str, Region]
"""A tensor's name, and `[from, to)` for each of its dimensions in the file."""


@dataclass(frozen=True)
class WeightSource:
    """What parameters are read from: files, the family's rules for names, the expert of every slot, int [M, P].

    Without `expert_of_slot` slot i holds expert i. Tensors that match a pattern of `ignored` are not read.
    """

    files: CheckpointFiles
    rules: Mapping[str, str]
    expert_of_slot: np.ndarray | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagedParameter:
    """A parameter in host memory: its shards for the devices of this host."""

    spec: ParamSpec
    sharding: jax.sharding.Sharding
    shards: tuple[tuple[np.ndarray, list[jax.Device]], ...]

    def on_devices(self) -> jax.Array:
        """Copy it to its devices."""
        return _on_devices(self.spec, self.sharding, shards=self.shards)


class PieceReader:
    """Reads pieces in any order, keeping those that will be needed again, in the smaller of two dtypes."""

    def __init__(self, files: CheckpointFiles, wanted: Iterable[Piece], *, dtype: np.dtype) -> None:
        self._files, self._dtype = files, dtype
        self._times_wanted = Counter(wanted)
        self._kept: dict[Piece, np.ndarray] = {}
        self.kept_bytes = 0

    def take(self, piece: Piece) -> np.ndarray:
        """Return a piece in the file's orientation and dtype, or in the parameter's where that is smaller."""
        name, region = piece
        values = self._kept.get(piece)
        if values is None:
            values = self._files.read(name, tuple(slice(*bounds) for bounds in region))
            values = values.astype(self._dtype) if values.itemsize > self._dtype.itemsize else values
        self._times_wanted[piece] -= 1
        if piece not in self._kept and self._times_wanted[piece] and self.kept_bytes + values.nbytes <= KEPT_BYTES:
            self._kept[piece] = values
            self.kept_bytes += values.nbytes
        elif piece in self._kept and not self._times_wanted[piece]:
            self.kept_bytes -= self._kept.pop(piece).nbytes
        return values


def load_parameters(
    source: WeightSource,
    tree: SpecTree,
    *,
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
    in_host_memory: bool = False,
) -> dict[str, Any]:
    """Verify the checkpoint, then build one jax.Array per ParamSpec in a tree of the same keys.

    Arrays have the spec's shape and dtype and the sharding that `sharding_of` returns for it. In a multi-process run
    every process calls this with the same arguments and reads its own part. With `in_host_memory` leaves are
    StagedParameters. CheckpointError as in `names.verify`, for values that are not finite, and for files that change
    meanwhile; ValueError where the source's `expert_of_slot` does not fit the tree's layers, slots and experts.
    """
    for _, spec in walk(tree):
        if spec.num_experts:
            _check_slots(spec, source.expert_of_slot)
    verify(source.files, tree, rules=source.rules, ignored=source.ignored)

    def load(spec: ParamSpec) -> jax.Array | StagedParameter:
        sharding = sharding_of(spec)
        shards = _shards(source, spec, sharding)
        if in_host_memory:
            return StagedParameter(spec, sharding, tuple(shards))
        return _on_devices(spec, sharding, shards=shards)

    loaded = _mapped(load, tree)
    source.files.check_unchanged()
    return loaded


def _check_slots(spec: ParamSpec, expert_of_slot: np.ndarray | None) -> None:
    num_layers, num_slots, *_ = spec.shape
    if expert_of_slot is None:
        if num_slots != spec.num_experts:
            raise ValueError(f"{num_slots} slots for {spec.num_experts} experts: say which expert each slot holds")
        return
    if expert_of_slot.shape != (num_layers, num_slots):
        raise ValueError(f"expert_of_slot is of shape {expert_of_slot.shape}, not {(num_layers, num_slots)}")
    if expert_of_slot.min() < 0 or expert_of_slot.max() >= spec.num_experts:
        raise ValueError(f"expert_of_slot names an expert outside of 0..{spec.num_experts - 1}")


def _mapped(read: Callable[[ParamSpec], Any], tree: SpecTree) -> dict[str, Any]:
    """A tree of the same keys with `read` of each spec."""
    return {key: read(node) if isinstance(node, ParamSpec) else _mapped(read, node) for key, node in tree.items()}


def _shards(
    source: WeightSource, spec: ParamSpec, sharding: jax.sharding.Sharding
) -> Iterator[tuple[np.ndarray, list[jax.Device]]]:
    """Read the shards of the devices of this host, one region after the other."""
    devices_by_region: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None, "every addressable device holds a shard"
        devices_by_region.setdefault(_region(index, spec.shape), []).append(device)
    wanted = (piece for region in devices_by_region for _, piece in _pieces(source, spec, region))
    reader = PieceReader(source.files, wanted, dtype=jax.numpy.dtype(spec.dtype))
    for region, devices in devices_by_region.items():
        yield read_region(source, spec, region=region, reader=reader), devices


def _on_devices(
    spec: ParamSpec, sharding: jax.sharding.Sharding, *, shards: Iterable[tuple[np.ndarray, list[jax.Device]]]
) -> jax.Array:
    held: list[jax.Array] = []
    for values, devices in shards:
        # Wait for the copies, so that the next region is read only when this one is off the host.
        held += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, held, dtype=jax.numpy.dtype(spec.dtype))


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Turn a device's index into `[from, to)` per dimension."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in bounds), "a shard must be contiguous in every dimension"
    return tuple((start, stop) for start, stop, _ in bounds)


def read_region(
    source: WeightSource, spec: ParamSpec, *, region: Region, reader: PieceReader | None = None
) -> np.ndarray:
    """Read one block of a parameter, `[from, to)` per dimension, in the spec's dtype, orientation and layout.

    Padding is zeros. `reader` has what is shared with other regions.
    """
    dtype = jax.numpy.dtype(spec.dtype)
    reader = reader or PieceReader(source.files, (piece for _, piece in _pieces(source, spec, region)), dtype=dtype)
    values = np.zeros([stop - start for start, stop in region], dtype)
    filled = _filled(spec, region)
    columns = _columns_of_piece(spec.columns_in_file(*filled[spec.column_dim]))
    within = tuple(slice(0, stop - start) for start, stop in filled)
    for place, piece in _pieces(source, spec, region):
        read = reader.take(piece)
        read = read.reshape(read.shape[spec.num_leading_dims :])
        held = read.T if spec.transposed else read
        values[place + within] = held[columns] if spec.column_dim == 0 else held[..., columns]
        if not is_finite(values[place + within]):
            raise CheckpointError(f"{source.files.directory}: tensor {piece[0]} holds values that are not finite")
    return LAYOUTS[spec.layout](values)


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; `values` of a dtype in INFINITIES. Two sweeps over its bits, no copy."""
    if values.size == 0:
        return True
    signed, unsigned, plus, minus = INFINITIES[values.dtype]
    return bool(values.view(signed).max() < plus and (values.view(unsigned).max() < minus))


def _pieces(source: WeightSource, spec: ParamSpec, region: Region) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Yield the pieces of a region with their places on its stacked dimensions; none where all of it is padding."""
    filled = _filled(spec, region)
    if any(stop <= start for start, stop in filled):
        return
    columns = spec.columns_in_file(*filled[spec.column_dim])
    held = list(filled)
    held[spec.column_dim] = int(columns.min()), int(columns.max()) + 1
    in_file = held[::-1] if spec.transposed else held
    stacked = region[: spec.num_stacked_dims]
    for stack_index in product(*(range(*bounds) for bounds in stacked)):
        place = tuple(index - start for index, (start, _) in zip(stack_index, stacked, strict=True))
        if spec.num_experts and source.expert_of_slot is not None:
            stack_index = (*stack_index[:-1], int(source.expert_of_slot[stack_index]))
        leading = ((stack_index[-1], stack_index[-1] + 1),) if spec.experts_in_file else ((0, 1),) * spec.file_row
        yield place, (tensor_name(spec, stack_index, rules=source.rules), (*leading, *in_file))


def _filled(spec: ParamSpec, region: Region) -> Region:
    """The part of a region's inner dimensions that is no padding."""
    within = region[spec.num_stacked_dims :]
    return tuple((start, min(stop, size)) for (start, stop), size in zip(within, spec.filled_shape, strict=True))


def _columns_of_piece(columns: np.ndarray) -> slice | np.ndarray:
    """Which columns of a piece are `columns` of its file, from the least of which it begins: a slice if it can be."""
    steps = np.unique(np.diff(columns))
    if len(steps) > 1 or (steps < 1).any():
        return columns - columns.min()
    return slice(None, None, *(int(step) for step in steps))
