"""Load parameters onto devices: every host reads only the slices that its own devices hold.

Memory on the host stays at about one device's shard of one parameter, and KEPT_BYTES: shards are read, sent and
dropped in turn. What several devices of a host hold, such as an expert with replicas, is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import jax
import numpy as np

from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.finite import is_finite
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, tensor_name, verify, walk
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.model.parameters import ParamSpec

KEPT_BYTES = 4 << 30
"""Most bytes kept for devices whose turn is still to come; beyond that a slice is read anew, most likely from the
operating system's cache."""

ArrayTree = dict[str, "jax.Array | ArrayTree"]
StagedTree = dict[str, "StagedParameter | StagedTree"]
Leaf = TypeVar("Leaf")
Range = tuple[int, int]
Region = tuple[Range, ...]
Piece = tuple[str, Region]
"""A tensor's name, and `[from, to)` for each of its dimensions in the file."""


@dataclass(frozen=True)
class WeightSource:
    """What parameters are filled from: files, the family's rules for names, and the expert of every slot [M, P].

    Without `expert_of_slot` slot i holds expert i.
    """

    files: CheckpointFiles
    rules: Mapping[str, str]
    expert_of_slot: np.ndarray | None = None


@dataclass(frozen=True)
class StagedParameter:
    """A parameter in host memory: each region that devices of this host are to hold, with those devices."""

    spec: ParamSpec
    sharding: jax.sharding.Sharding
    shards: tuple[tuple[np.ndarray, list[jax.Device]], ...]

    def on_devices(self) -> jax.Array:
        """Copy it to its devices."""
        return _on_devices(self.spec, self.sharding, shards=self.shards)


class PieceReader:
    """Reads pieces that are asked for in any order, keeping those that will be asked for again."""

    def __init__(self, files: CheckpointFiles, wanted: Iterable[Piece]) -> None:
        self._files = files
        self._times_wanted = Counter(wanted)
        self._kept: dict[Piece, np.ndarray] = {}
        self.kept_bytes = 0

    def take(self, piece: Piece) -> np.ndarray:
        """Return a piece in the file's dtype and orientation."""
        name, region = piece
        values = self._kept.get(piece)
        if values is None:
            values = self._files.read(name, tuple(slice(*bounds) for bounds in region))
        self._times_wanted[piece] -= 1
        if piece not in self._kept and self._times_wanted[piece] and self.kept_bytes + values.nbytes <= KEPT_BYTES:
            self._kept[piece] = values
            self.kept_bytes += values.nbytes
        elif piece in self._kept and not self._times_wanted[piece]:
            self.kept_bytes -= self._kept.pop(piece).nbytes
        return values


def load_parameters(
    files: CheckpointFiles,
    tree: SpecTree,
    *,
    rules: Mapping[str, str],
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
    expert_of_slot: np.ndarray | None = None,
) -> ArrayTree:
    """Verify the checkpoint, then build one jax.Array per ParamSpec in a tree of the same keys.

    Arrays have the spec's shape and dtype and the sharding that `sharding_of` names for it. `expert_of_slot` int
    [MoE layers, slots] names the expert of each slot; without it slot i holds expert i. In a multi-process run every
    process calls this with the same arguments and reads its own part. CheckpointError as in `names.verify`, for values
    that are not finite, and for files that change meanwhile; ValueError where `expert_of_slot` is not of the tree's
    layers, slots and experts.
    """
    source = _checked_source(files, tree, rules=rules, expert_of_slot=expert_of_slot)

    def load(spec: ParamSpec) -> jax.Array:
        sharding = sharding_of(spec)
        return _on_devices(spec, sharding, shards=_shards(source, spec, sharding))

    loaded = _mapped(load, tree)
    files.check_unchanged()
    return loaded


def stage_parameters(
    files: CheckpointFiles,
    tree: SpecTree,
    *,
    rules: Mapping[str, str],
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
    expert_of_slot: np.ndarray | None = None,
) -> StagedTree:
    """Do as `load_parameters`, but leave everything in host memory."""
    source = _checked_source(files, tree, rules=rules, expert_of_slot=expert_of_slot)

    def stage(spec: ParamSpec) -> StagedParameter:
        sharding = sharding_of(spec)
        return StagedParameter(spec, sharding, tuple(_shards(source, spec, sharding)))

    staged = _mapped(stage, tree)
    files.check_unchanged()
    return staged


def _checked_source(
    files: CheckpointFiles, tree: SpecTree, *, rules: Mapping[str, str], expert_of_slot: np.ndarray | None
) -> WeightSource:
    for _, spec in walk(tree):
        if spec.num_experts:
            _check_slots(spec, expert_of_slot)
    verify(files, tree, rules=rules)
    return WeightSource(files, rules, expert_of_slot)


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


def _mapped(read: Callable[[ParamSpec], Leaf], tree: SpecTree) -> dict[str, Any]:
    """A tree of the same keys with what is read for each spec."""
    return {key: read(node) if isinstance(node, ParamSpec) else _mapped(read, node) for key, node in tree.items()}


def _shards(
    source: WeightSource, spec: ParamSpec, sharding: jax.sharding.Sharding
) -> Iterator[tuple[np.ndarray, list[jax.Device]]]:
    """Read what the devices of this host are to hold, one region after the other."""
    devices_by_region: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None, "every addressable device holds a shard"
        devices_by_region.setdefault(_region(index, spec.shape), []).append(device)
    wanted = (piece for region in devices_by_region for _, piece in _pieces(source, spec, region))
    reader = PieceReader(source.files, wanted)
    for region, devices in devices_by_region.items():
        yield _fill(source, spec, region, reader), devices


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


def read_region(source: WeightSource, spec: ParamSpec, *, region: Region) -> np.ndarray:
    """Read one block of a parameter, `[from, to)` per dimension, in the spec's dtype, orientation and layout."""
    wanted = (piece for _, piece in _pieces(source, spec, region))
    return _fill(source, spec, region, PieceReader(source.files, wanted))


def _fill(source: WeightSource, spec: ParamSpec, region: Region, reader: PieceReader) -> np.ndarray:
    """Assemble a region from its pieces; what is padding stays zero."""
    values = np.zeros([stop - start for start, stop in region], jax.numpy.dtype(spec.dtype))
    filled = _filled(spec, region)
    columns = _file_columns(spec, filled[-1])
    within = tuple(slice(0, stop - start) for start, stop in filled)
    for place, piece in _pieces(source, spec, region):
        read = reader.take(piece)
        held = read.T if spec.transposed else read
        values[place + within] = held if spec.repeats == 1 else held[..., columns - columns[0]]
        if not is_finite(values[place + within]):
            raise CheckpointError(f"{source.files.directory}: tensor {piece[0]} holds values that are not finite")
    return LAYOUTS[spec.layout](values)


def _pieces(source: WeightSource, spec: ParamSpec, region: Region) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Yield the pieces of a region with their places on its stacked dimensions; none where all of it is padding."""
    filled = _filled(spec, region)
    if any(stop <= start for start, stop in filled):
        return
    columns = _file_columns(spec, filled[-1])
    held = (*filled[:-1], (int(columns[0]), int(columns[-1]) + 1))
    in_file = held[::-1] if spec.transposed else held
    stacked = region[: spec.num_stacked_dims]
    for stack_index in product(*(range(*bounds) for bounds in stacked)):
        place = tuple(index - start for index, (start, _) in zip(stack_index, stacked, strict=True))
        if spec.num_experts and source.expert_of_slot is not None:
            stack_index = (*stack_index[:-1], int(source.expert_of_slot[stack_index]))
        yield place, (tensor_name(spec, stack_index, rules=source.rules), in_file)


def _filled(spec: ParamSpec, region: Region) -> Region:
    """The part of a region's inner dimensions that is no padding."""
    within = region[spec.num_stacked_dims :]
    return tuple((start, min(stop, size)) for (start, stop), size in zip(within, spec.filled_shape, strict=True))


def _file_columns(spec: ParamSpec, held: Range) -> np.ndarray:
    """Which columns of the file fill the held columns `[from, to)` of the last dimension."""
    head, offset = np.divmod(np.arange(*held), spec.repeat_width)
    return head // spec.repeats * spec.repeat_width + offset
