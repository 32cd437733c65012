"""Load parameters onto devices: every host reads only the slices that its own devices hold.

Memory on the host stays at about one device's shard of one parameter: shards are read, sent and dropped in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import jax
import numpy as np

from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.names import SpecTree, tensor_name, verify
from rayserve_moe.model.parameters import ParamSpec

ArrayTree = dict[str, "jax.Array | ArrayTree"]
Range = tuple[int, int]


def load_parameters(
    files: CheckpointFiles,
    tree: SpecTree,
    *,
    rules: Mapping[str, str],
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
) -> ArrayTree:
    """Verify the checkpoint, then build one jax.Array per ParamSpec in a tree of the same keys.

    Arrays have the spec's shape and dtype and the sharding that `sharding_of` names for it. In a multi-process run
    every process calls this with the same arguments and reads its own part. CheckpointError as in `names.verify`.
    """
    verify(files, tree, rules=rules)
    return _load_tree(files, tree, rules, sharding_of)


def _load_tree(
    files: CheckpointFiles,
    tree: SpecTree,
    rules: Mapping[str, str],
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
) -> ArrayTree:
    return {
        key: _load_array(files, node, rules, sharding_of(node))
        if isinstance(node, ParamSpec)
        else _load_tree(files, node, rules, sharding_of)
        for key, node in tree.items()
    }


def _load_array(
    files: CheckpointFiles, spec: ParamSpec, rules: Mapping[str, str], sharding: jax.sharding.Sharding
) -> jax.Array:
    devices_by_region: dict[tuple[Range, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None, "every addressable device holds a shard"
        devices_by_region.setdefault(_region(index, spec.shape), []).append(device)
    shards: list[jax.Array] = []
    for region, devices in devices_by_region.items():
        values = read_region(files, spec, rules=rules, region=region)
        # Wait for the copies, so that the next region is read only when this one is off the host.
        shards += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards, dtype=jax.numpy.dtype(spec.dtype))


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Range, ...]:
    """Turn a device's index into `[from, to)` per dimension."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in bounds), "a shard must be contiguous in every dimension"
    return tuple((start, stop) for start, stop, _ in bounds)


def read_region(
    files: CheckpointFiles, spec: ParamSpec, *, rules: Mapping[str, str], region: tuple[Range, ...]
) -> np.ndarray:
    """Read one block of a parameter, `[from, to)` per dimension, in the spec's dtype and orientation."""
    stacked, within = region[: spec.num_stacked_dims], region[spec.num_stacked_dims :]
    columns = _file_columns(spec, within[-1])
    needed = (*within[:-1], (int(columns[0]), int(columns[-1]) + 1))
    file_index = tuple(slice(*bounds) for bounds in (needed[::-1] if spec.transposed else needed))
    values = np.empty([stop - start for start, stop in region], jax.numpy.dtype(spec.dtype))
    for stack_index in product(*(range(*bounds) for bounds in stacked)):
        piece = files.read(tensor_name(spec, stack_index, rules=rules), file_index)
        place = tuple(index - start for index, (start, _) in zip(stack_index, stacked, strict=True))
        held = piece.T if spec.transposed else piece
        values[place] = held if spec.repeats == 1 else held[..., columns - columns[0]]
    return values


def _file_columns(spec: ParamSpec, held: Range) -> np.ndarray:
    """Which columns of the file fill the held columns `[from, to)` of the last dimension."""
    head, offset = np.divmod(np.arange(*held), spec.repeat_width)
    return head // spec.repeats * spec.repeat_width + offset
