"""The parts of tensors that fill a host's shards: regions of parameters, and the pieces of files for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import jax
import numpy as np

from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.names import tensor_name
from rayserve_moe.checkpoints.pieces import Piece, Region
from rayserve_moe.kernels.narrow_weights import scale_rows
from rayserve_moe.model.param_spec import ParamSpec

PART_BYTES = 16 << 20
"""Bytes of a tensor, in float32, that a thread reads, casts and stores at once."""


@dataclass(frozen=True)
class WeightSource:
    """The source of parameters."""

    files: CheckpointFiles
    rules: Mapping[str, str]
    """The family's rules for names."""
    expert_of_slot: np.ndarray | None = None
    """Expert of every slot, int [M, P]; None: slot i holds expert i."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are not read."""


def regions_of(spec: ParamSpec, sharding: jax.sharding.Sharding) -> dict[Region, list[jax.Device]]:
    """Return this host's shards: the devices of each region."""
    devices_by_region: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None, "every addressable device holds a shard"
        devices_by_region.setdefault(region_of(index, spec.shape), []).append(device)
    return devices_by_region


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return a device's index as `[from, to)` per dimension."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in bounds), "a shard must be contiguous in every dimension"
    return tuple((start, stop) for start, stop, _ in bounds)


def scale_region(spec: ParamSpec, region: Region) -> Region:
    """Return the region of a matrix region's scales among all of its scales."""
    return (*region[:-2], (0, scale_rows(spec.shape[-2]) if spec.scale_block else 1), region[-1])


def empty_blocks(spec: ParamSpec, region: Region) -> list[np.ndarray]:
    """Return zeroed blocks for a region of a parameter: values, and scales if it is quantised.

    8-bit numbers are stored as their bits: numpy copies only its own dtypes without the interpreter lock.
    """
    blocks = [np.zeros(_sizes(region), np.int8 if spec.is_quantized else jax.numpy.dtype(spec.dtype))]
    return [*blocks, np.zeros(_sizes(scale_region(spec, region)), np.float32)] if spec.is_quantized else blocks


def views_of(blocks: list[np.ndarray], part: Region, *, region: Region) -> list[np.ndarray]:
    """Return the views of a part of a region: of its values, and of its scales if it has any."""
    place = [slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, region, strict=True)]
    at_scales = (*place[:-2], slice(None), place[-1]) if len(blocks) > 1 else ()
    return [block[tuple(at)] for block, at in zip(blocks, (place, at_scales), strict=False)]


def _sizes(region: Region) -> list[int]:
    return [stop - start for start, stop in region]


def parts_of(source: WeightSource, spec: ParamSpec, *, region: Region) -> Iterator[Region]:
    """Yield parts of a region to read at once: each within a single tensor, about PART_BYTES of its rows."""
    stacked, within = region[: spec.num_stacked_dims], region[spec.num_stacked_dims :]
    row_dim = 0
    if len(within) > 1:
        name = tensor_name(spec, (0,) * len(stacked), rules=source.rules)
        # Quantised parameters are cut between columns, so that each part has all rows of its columns.
        rows_last = spec.is_quantized or (source.files.row_dim(name) == -1) != spec.file.transposed
        row_dim = len(within) - 1 if rows_last else 0
    start, stop = within[row_dim]
    row_bytes = 4 * math.prod(spec.file_shape[spec.num_leading_dims :]) // max(1, _file_rows(spec, row_dim))
    num_rows = max(1, PART_BYTES // max(1, row_bytes))
    if spec.scale_block:  # whole blocks
        num_rows = -(-num_rows // spec.scale_block) * spec.scale_block
    for index in product(*(range(*bounds) for bounds in stacked)):
        for first in range(start, stop, num_rows):
            rows = first, min(first + num_rows, stop)
            yield (*((each, each + 1) for each in index), *within[:row_dim], rows, *within[row_dim + 1 :])


def _file_rows(spec: ParamSpec, row_dim: int) -> int:
    """Return the number of rows of a file's tensor, including rows of other parameters."""
    is_columns = row_dim == spec.column_dim % len(spec.filled_shape)
    return spec.num_file_columns if is_columns else spec.filled_shape[row_dim]


def pieces_of(source: WeightSource, spec: ParamSpec, *, region: Region) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Yield the pieces of a region with their indices on its stacked dimensions; nothing if all of it is padding."""
    filled = filled_part(spec, region)
    if any(stop <= start for start, stop in filled):
        return
    columns = spec.columns_in_file(*filled[spec.column_dim])
    held = list(filled)
    held[spec.column_dim] = int(columns.min()), int(columns.max()) + 1
    in_file = held[::-1] if spec.file.transposed else held
    stacked = region[: spec.num_stacked_dims]
    for stack_index in product(*(range(*bounds) for bounds in stacked)):
        place = tuple(index - start for index, (start, _) in zip(stack_index, stacked, strict=True))
        if spec.num_experts and source.expert_of_slot is not None:
            stack_index = (*stack_index[:-1], int(source.expert_of_slot[stack_index]))
        leading = ((0, 1),) * spec.file.is_row
        if spec.file.has_all_experts:
            leading = ((stack_index[-1], stack_index[-1] + 1),)
        yield place, (tensor_name(spec, stack_index, rules=source.rules), (*leading, *in_file))


def filled_part(spec: ParamSpec, region: Region) -> Region:
    """Return a region's inner dimensions without padding."""
    within = region[spec.num_stacked_dims :]
    return tuple((start, min(stop, size)) for (start, stop), size in zip(within, spec.filled_shape, strict=True))


def columns_of_piece(columns: np.ndarray) -> slice | np.ndarray:
    """Return the indices of file `columns` within a piece that begins at the smallest: a slice if possible."""
    steps = np.unique(np.diff(columns))
    if len(steps) > 1 or (steps < 1).any():
        return columns - columns.min()
    return slice(None, None, *(int(step) for step in steps))


def as_held(spec: ParamSpec, read: np.ndarray, *, columns: slice | np.ndarray) -> np.ndarray:
    """Return the columns of a piece of a file in the orientation of the parameter, times its factor, with its offset.

    Booleans, which mark the columns that are given, have neither.
    """
    read = read.reshape(read.shape[spec.num_leading_dims :])
    held = read.T if spec.file.transposed else read
    held = held[columns] if spec.column_dim == 0 else held[..., columns]
    if held.dtype == np.bool_:
        return held
    held = held * np.float32(spec.file.factor) if spec.file.factor != 1.0 else held
    return held + np.float32(spec.file.offset) if spec.file.offset else held
