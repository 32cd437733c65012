"""Load parameters onto devices: every host reads only the slices that its own devices hold.

Host memory stays at about one device's shard of one parameter, and KEPT_BYTES: shards are read, copied to the device
and dropped in turn. What several devices of a host hold, such as an expert with replicas, is read once. A shard is
filled part by part on all cores. Parts of a remote checkpoint are read ahead, many at once (`pieces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import numpy as np

from rayserve_moe.checkpoints.casting import assign, is_finite
from rayserve_moe.checkpoints.channels import quantize_columns
from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, tensor_name, verify, walk
from rayserve_moe.checkpoints.pieces import (
    OpenedPieces,
    Piece,
    PieceReader,
    Region,
    as_read,
    fill_all,
    opened_pieces,
)
from rayserve_moe.checkpoints.staged import StagedParameter, on_devices
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.narrow_weights import scale_rows
from rayserve_moe.model.param_spec import ParamSpec

PART_BYTES = 16 << 20
"""Of a tensor, in float32, that is read, cast and put into its place at once, by one thread."""

Scales = dict[tuple[str, Region], np.ndarray]
"""Scales of quantised matrices by role and region, float32, from when those are read until they are asked for."""


@dataclass(frozen=True)
class WeightSource:
    """What parameters are read from: files, the family's rules for names, the expert of every slot, int [M, P].

    Without `expert_of_slot` slot i holds expert i. Tensors that match a pattern of `ignored` are not read.
    """

    files: CheckpointFiles
    rules: Mapping[str, str]
    expert_of_slot: np.ndarray | None = None
    ignored: tuple[str, ...] = ()


def load_parameters(
    source: WeightSource,
    tree: SpecTree,
    *,
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
    in_host_memory: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Verify the checkpoint, then build one jax.Array per ParamSpec in a tree of the same keys.

    Arrays have the spec's shape and dtype and the sharding that `sharding_of` returns for it. In a multi-process
    run every process calls this with the same arguments and reads its own part. With `in_host_memory` leaves are
    StagedParameters. Parameters of a dtype of 8 bits are quantised part by part, and their scales found with them,
    whose specs come behind theirs in the tree; what files hold in the same dtype and blocks keeps its bytes and
    scales. `num_threads` fill shards, one per core where it is 0. CheckpointError as in `names.verify`, for values
    that are not finite, and for files that change meanwhile; ValueError where the source's `expert_of_slot` does
    not fit the tree's layers, slots and experts.
    """
    for _, spec in walk(tree):
        if spec.num_experts:
            _check_slots(spec, source.expert_of_slot)
    verify(source.files, tree, rules=source.rules, ignored=source.ignored)

    scales: Scales = {}
    with opened_pieces(source.files, _all_pieces(source, tree, sharding_of), num_threads=num_threads) as pieces:

        def load(spec: ParamSpec) -> jax.Array | StagedParameter:
            sharding = sharding_of(spec)
            if spec.is_scale:
                found = ((scales.pop((spec.role, region)), held) for region, held in _regions(spec, sharding).items())
            shards = found if spec.is_scale else _shards(source, spec, sharding, pieces=pieces, scales=scales)
            if in_host_memory:
                return StagedParameter(spec, sharding, tuple(shards))
            return on_devices(spec, sharding, shards=shards)

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


def _regions(spec: ParamSpec, sharding: jax.sharding.Sharding) -> dict[Region, list[jax.Device]]:
    """The shards of the devices of this host."""
    devices_by_region: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None, "every addressable device holds a shard"
        devices_by_region.setdefault(_region(index, spec.shape), []).append(device)
    return devices_by_region


def _all_pieces(
    source: WeightSource, tree: SpecTree, sharding_of: Callable[[ParamSpec], jax.sharding.Sharding]
) -> Iterator[Piece]:
    """The pieces of all shards in the order in which they are wanted first, those of a parameter once."""
    for spec in (spec for _, spec in walk(tree) if not spec.is_scale):
        regions = _regions(spec, sharding_of(spec))
        yield from dict.fromkeys(piece for region in regions for piece in _wanted(source, spec, region))


def _wanted(source: WeightSource, spec: ParamSpec, region: Region) -> Iterator[Piece]:
    """The pieces of a region, in the order of its parts, as they are read."""
    for part in _parts(source, spec, region):
        for _, piece in _pieces(source, spec, part):
            yield as_read(source.files, piece)


def _shards(
    source: WeightSource, spec: ParamSpec, sharding: jax.sharding.Sharding, *, pieces: OpenedPieces, scales: Scales
) -> Iterator[tuple[np.ndarray, list[jax.Device]]]:
    """Read the shards of the devices of this host, one region after the other; their `scales` are added to those."""
    devices_by_region = _regions(spec, sharding)
    wanted = (piece for region in devices_by_region for piece in _wanted(source, spec, region))
    reader = PieceReader(source.files, wanted, dtype=_read_dtype(spec), ahead=pieces.ahead)
    for region, devices in devices_by_region.items():
        yield read_region(source, spec, region=region, reader=reader, pool=pieces.pool, scales=scales), devices


def _read_dtype(spec: ParamSpec) -> np.dtype:
    """What pieces are kept in until they are held: what is quantised, as files have it."""
    return np.dtype(np.float32) if spec.is_quantized else jax.numpy.dtype(spec.dtype)


def _scale_region(spec: ParamSpec, region: Region) -> Region:
    """Where the scales of a region of a matrix lie among all of its scales."""
    return (*region[:-2], (0, scale_rows(spec.shape[-2]) if spec.scale_block else 1), region[-1])


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Turn a device's index into `[from, to)` per dimension."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in bounds), "a shard must be contiguous in every dimension"
    return tuple((start, stop) for start, stop, _ in bounds)


def read_region(
    source: WeightSource,
    spec: ParamSpec,
    *,
    region: Region,
    reader: PieceReader | None = None,
    pool: ThreadPoolExecutor | None = None,
    scales: Scales | None = None,
) -> np.ndarray:
    """Read one block of a parameter, `[from, to)` per dimension, in the spec's dtype, orientation and layout.

    Padding is zeros. `reader` has what is shared with other regions, `pool` the threads that share the work. `scales`
    takes those of a quantised block, which has all rows of its matrices.
    """
    reader = reader or PieceReader(source.files, _wanted(source, spec, region), dtype=_read_dtype(spec))
    dtype = jax.numpy.dtype(spec.dtype)
    # Numbers of 8 bits are filled in as their bits: numpy copies those of dtypes of its own alone without the lock.
    blocks = [np.zeros([stop - start for start, stop in region], np.int8 if spec.is_quantized else dtype)]
    if spec.is_quantized:
        of_scales = _scale_region(spec, region)
        blocks.append(np.zeros([stop - start for start, stop in of_scales], np.float32))
        if scales is not None:
            scales[spec.role, of_scales] = blocks[1]

    def fill(part: Region) -> None:
        place = [slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, region, strict=True)]
        at_scales = (*place[:-2], slice(None), place[-1])
        within = [block[tuple(at)] for block, at in zip(blocks, (place, at_scales), strict=False)]
        _fill(source, spec, within, part=part, reader=reader)

    parts = _parts(source, spec, region)
    if pool is None:
        for part in parts:
            fill(part)
    else:
        fill_all(pool, parts, fill=fill)
    return LAYOUTS[spec.layout](blocks[0]).view(dtype)


def _fill(
    source: WeightSource, spec: ParamSpec, blocks: Sequence[np.ndarray], *, part: Region, reader: PieceReader
) -> None:
    """Read a part of a region into its place: its values, or integers and their scales."""
    values, *scales = blocks
    filled = _filled(spec, part)
    within = tuple(slice(0, stop - start) for start, stop in filled)
    for place, piece in _pieces(source, spec, part):
        columns = _columns_of_piece(spec.columns_in_file(*filled[spec.column_dim]))
        read = reader.take(piece)
        read = read.reshape(read.shape[spec.num_leading_dims :])
        held = read.T if spec.transposed else read
        held = held[columns] if spec.column_dim == 0 else held[..., columns]
        if not scales:
            assign(values[place + within], held)
        if not is_finite(held if scales else values[place + within]):
            raise CheckpointError(f"{source.files.directory}: tensor {piece[0]} holds values that are not finite")
        if scales:
            given = _scales_in_files(source, spec, piece)
            found = quantize_columns(
                held, spec.dtype, block=spec.scale_block, scales_ZO=None if given is None else given[:, columns]
            )
            values[place + within] = found.values_IO
            scales[0][(*place, slice(0, len(found.scales_ZO)), within[-1])] = found.scales_ZO


def _scales_in_files(source: WeightSource, spec: ParamSpec, piece: Piece) -> np.ndarray | None:
    """What a piece in the same dtype and blocks was multiplied by when it was decoded: [Z, columns of the piece].

    None where the file has none, or other ones: then the values are quantised anew.
    """
    if not spec.scale_block or not spec.transposed:
        return None
    scales = source.files.read_scales(*piece, dtype=spec.dtype, block=spec.scale_block)
    return None if scales is None else scales.T


def _parts(source: WeightSource, spec: ParamSpec, region: Region) -> Iterator[Region]:
    """Cut a region into parts of one tensor each, and of PART_BYTES of its rows: what is read at once."""
    stacked, within = region[: spec.num_stacked_dims], region[spec.num_stacked_dims :]
    row_dim = 0
    if len(within) > 1:
        name = tensor_name(spec, (0,) * len(stacked), rules=source.rules)
        # What is quantised is cut between columns, so that each of them has all of its rows.
        rows_last = spec.is_quantized or (source.files.row_dim(name) == -1) != spec.transposed
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
    """Rows of a tensor of the file, those of other parameters included."""
    is_columns = row_dim == spec.column_dim % len(spec.filled_shape)
    return spec.num_file_columns if is_columns else spec.filled_shape[row_dim]


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
