"""Loading of parameters onto devices: every host reads only the slices that its own devices hold.

Host memory stays at about a device's shard of a parameter, plus KEPT_BYTES: shards are read, copied to the device and
dropped in turn. A slice that several devices of a host hold, such as an expert with replicas, is read once. A shard is
filled part by part on all cores. Parts of a remote checkpoint are read ahead, many at once (`pieces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from rayserve_moe.checkpoints.casting import assign, cast, is_finite
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, verify, walk
from rayserve_moe.checkpoints.parts import (
    WeightSource,
    as_held,
    columns_of_piece,
    empty_blocks,
    filled_part,
    parts_of,
    pieces_of,
    regions_of,
    scale_region,
    views_of,
)
from rayserve_moe.checkpoints.pieces import (
    OpenedPieces,
    Piece,
    PieceReader,
    PieceSource,
    Region,
    as_read,
    fill_all,
    opened_pieces,
)
from rayserve_moe.checkpoints.staged import StagedParameter, on_devices
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.model.param_spec import LARGEST_OF, ParamSpec
from rayserve_moe.observability.progress import Counter

Scales = dict[tuple[str, Region], np.ndarray]
"""Scales of quantised matrices by role and region, float32, kept from their computation to their use."""
REPORTED_BYTES = 64 << 20
"""Minimum bytes between two reports of progress."""


def load_parameters(
    source: WeightSource,
    tree: SpecTree,
    *,
    sharding_of: Callable[[ParamSpec], jax.sharding.Sharding],
    in_host_memory: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Verify the checkpoint, then build a jax.Array per ParamSpec in a tree of the same keys.

    Arrays have the spec's shape and dtype and the sharding that `sharding_of` returns. In a multi-process run every
    process calls this with the same arguments and reads its own part. With `in_host_memory` leaves are
    StagedParameters. Parameters of an 8-bit dtype are quantised part by part, together with their scales, whose specs
    follow theirs in the tree; values that files hold in the same dtype and blocks keep their bytes and scales.
    `num_threads` fill shards; 0 is a thread per core. Raises CheckpointError like `names.verify`, for values that are
    not finite, and for files that change meanwhile; ValueError if the source's `expert_of_slot` does not match the
    tree's layers, slots and experts.
    """
    for _, spec in walk(tree):
        if spec.num_experts:
            _check_slots(spec, source.expert_of_slot)
    verify(source.files, tree, rules=source.rules, ignored=source.ignored)

    scales: Scales = {}
    num_bytes = sum(_num_bytes(spec) for _, spec in walk(tree))
    progress = Counter("reading weights", num_bytes, step=max(REPORTED_BYTES, num_bytes // 20))
    with opened_pieces(source.files, _all_pieces(source, tree, sharding_of), num_threads=num_threads) as pieces:

        def load(spec: ParamSpec) -> jax.Array | StagedParameter:
            sharding = sharding_of(spec)
            if spec.is_scale:
                found = ((scales.pop((spec.role, region)), held) for region, held in regions_of(spec, sharding).items())
            shards = found if spec.is_scale else _shards(source, spec, sharding, pieces=pieces, scales=scales)
            if in_host_memory:
                parameter = StagedParameter(spec, sharding, tuple(shards))
            else:
                parameter = on_devices(spec, sharding, shards=shards)
            progress.add(_num_bytes(spec))
            return parameter

        loaded = _mapped(load, tree)
    source.files.check_unchanged()
    return loaded


def _num_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _check_slots(spec: ParamSpec, expert_of_slot: np.ndarray | None) -> None:
    num_layers, num_slots, *_ = spec.shape
    if expert_of_slot is None:
        if num_slots != spec.num_experts:
            raise ValueError(f"{num_slots} slots for {spec.num_experts} experts: pass expert_of_slot")
        return
    if expert_of_slot.shape != (num_layers, num_slots):
        raise ValueError(f"expert_of_slot has shape {expert_of_slot.shape}, not {(num_layers, num_slots)}")
    if expert_of_slot.min() < 0 or expert_of_slot.max() >= spec.num_experts:
        raise ValueError(f"expert_of_slot names an expert outside of 0..{spec.num_experts - 1}")


def _mapped(read: Callable[[ParamSpec], Any], tree: SpecTree) -> dict[str, Any]:
    """Return a tree of the same keys with `read` applied to each spec."""
    return {key: read(node) if isinstance(node, ParamSpec) else _mapped(read, node) for key, node in tree.items()}


def _all_pieces(
    source: WeightSource, tree: SpecTree, sharding_of: Callable[[ParamSpec], jax.sharding.Sharding]
) -> Iterator[Piece]:
    """Yield the pieces of all shards in the order of their first use, each once per parameter."""
    for spec in (spec for _, spec in walk(tree) if not spec.is_scale):
        regions = regions_of(spec, sharding_of(spec))
        yield from dict.fromkeys(piece for region in regions for piece in _wanted(source, spec, region))


def _wanted(source: WeightSource, spec: ParamSpec, region: Region) -> Iterator[Piece]:
    """Yield the pieces of a region, in the order of its parts, as they are read."""
    for part in parts_of(source, spec, region=region):
        for _, piece in pieces_of(source, spec, region=part):
            yield as_read(source.files, piece)


def _shards(
    source: WeightSource, spec: ParamSpec, sharding: jax.sharding.Sharding, *, pieces: OpenedPieces, scales: Scales
) -> Iterator[tuple[np.ndarray, list[jax.Device]]]:
    """Yield the shards of this host's devices, a region after the other; add their scales to `scales`."""
    devices_by_region = regions_of(spec, sharding)
    wanted = (piece for region in devices_by_region for piece in _wanted(source, spec, region))
    reader = PieceReader(source.files, wanted, dtype=_read_dtype(spec), ahead=pieces.ahead)
    for region, devices in devices_by_region.items():
        yield read_region(source, spec, region=region, reader=reader, pool=pieces.pool, scales=scales), devices


def _read_dtype(spec: ParamSpec) -> np.dtype:
    """Return the dtype in which read pieces are kept; values to be quantised stay as files have them."""
    return np.dtype(np.float32) if spec.is_quantized else jax.numpy.dtype(spec.dtype)


def read_region(
    source: WeightSource,
    spec: ParamSpec,
    *,
    region: Region,
    reader: PieceReader | None = None,
    pool: ThreadPoolExecutor | None = None,
    scales: Scales | None = None,
) -> np.ndarray:
    """Read a block of a parameter, `[from, to)` per dimension, in the spec's dtype, orientation and layout.

    Padding is zeros. `reader` keeps pieces shared with other regions, `pool` has the threads that share the work.
    `scales` receives the scales of a quantised block, which has all rows of its matrices.
    """
    reader = reader or PieceReader(source.files, _wanted(source, spec, region), dtype=_read_dtype(spec))
    blocks = empty_blocks(spec, region)
    if spec.is_quantized and scales is not None:
        scales[spec.role, scale_region(spec, region)] = blocks[1]

    def fill(part: Region) -> None:
        fill_part(source, spec, blocks=views_of(blocks, part, region=region), part=part, reader=reader)

    parts = parts_of(source, spec, region=region)
    if pool is None:
        for part in parts:
            fill(part)
    else:
        fill_all(pool, parts, fill=fill)
    return LAYOUTS[spec.layout](blocks[0]).view(jax.numpy.dtype(spec.dtype))


def fill_part(
    source: WeightSource, spec: ParamSpec, *, blocks: Sequence[np.ndarray], part: Region, reader: PieceSource
) -> None:
    """Read a part of a region into its blocks: values, or integers and their scales.

    Raises CheckpointError for values that are not finite.
    """
    values, *scales = blocks
    filled = filled_part(spec, part)
    within = tuple(slice(0, stop - start) for start, stop in filled)
    for place, piece in pieces_of(source, spec, region=part):
        columns = columns_of_piece(spec.columns_in_file(*filled[spec.column_dim]))
        held = as_held(spec, reader.take(piece), columns=columns)
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
    """Return the scales of a piece stored in the same dtype and blocks, float32 [Z, columns of the piece].

    None if the file has no such scales; the values are then quantised anew.
    """
    if not spec.scale_block or not spec.file.transposed:
        return None
    scales = source.files.read_scales(*piece, dtype=spec.dtype, block=spec.scale_block)
    return None if scales is None else scales.T


FP8_ROUNDING, FP8_BIAS, FP8_STEP = 20, 120 << 3, np.float32(2.0**-9)
"""From float32 to e4m3: dropped mantissa bits, difference of the exponent biases at e4m3's exponent position, and
e4m3's smallest positive number.
"""


class QuantizedColumns(NamedTuple):
    """Columns quantised to 8 bits, and their scales. Z is 1, or the number of row blocks."""

    values_IO: np.ndarray
    """int8 [I, O]; e4m3 numbers are stored as their bits."""
    scales_ZO: np.ndarray
    """float32 [Z, O]; a value times its scale is the decoded number."""


def quantize_columns(
    values_IO: np.ndarray, dtype: str = "int8", *, block: int = 0, scales_ZO: np.ndarray | None = None
) -> QuantizedColumns:
    """Quantise finite floating values with one scale per column, ties to even.

    A scale maps the largest magnitude of its column to the largest number of `dtype`. With a `block`, each square of
    `block` rows and columns has its own scale. `scales_ZO` replaces the computed scales; the scales of decoded values
    restore the original 8-bit numbers. The error is at most half of the scale in int8; in e4m3 it is at most a
    sixteenth of the number or 2**-10 of the scale, whichever is larger. A column or block of zeros has scale 0.
    """
    wide_IO = cast(values_IO, np.dtype(np.float32))
    if scales_ZO is None:
        scales_ZO = _max_magnitudes(wide_IO, block) / np.float32(LARGEST_OF[dtype])
    divisors = np.where(scales_ZO > 0, scales_ZO, np.float32(1))
    steps_IO = wide_IO / (np.repeat(divisors, block, axis=0)[: len(wide_IO)] if block else divisors)
    np.clip(steps_IO, -LARGEST_OF[dtype], LARGEST_OF[dtype], out=steps_IO)
    values = _fp8_bits(steps_IO) if dtype == "float8_e4m3fn" else np.rint(steps_IO, out=steps_IO).astype(np.int8)
    return QuantizedColumns(values, scales_ZO)


def _max_magnitudes(values_IO: np.ndarray, block: int) -> np.ndarray:
    """Return the largest magnitude of each column, [1, O], or of each column's block, [Z, O]."""
    magnitudes_IO = np.abs(values_IO)
    if not block or not values_IO.size:
        return np.max(magnitudes_IO, axis=0, keepdims=True, initial=0)
    rows, columns = (np.arange(0, size, block) for size in values_IO.shape)
    largest = np.maximum.reduceat(np.maximum.reduceat(magnitudes_IO, rows, axis=0), columns, axis=1)
    return np.repeat(largest, block, axis=1)[:, : values_IO.shape[1]]


def _fp8_bits(values: np.ndarray) -> np.ndarray:
    """Return the e4m3 bits, as int8, of float32 values of magnitude at most 448, rounded to nearest, ties to even.

    Zeros have no sign: TPUs before tpu7x read a negative zero as NaN (`kernels.narrow_weights`). Integer operations
    replace a cast of ml_dtypes, which holds the interpreter lock, as in `casting`.
    """
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    code = ((magnitude >> FP8_ROUNDING) & 1) + np.uint32((1 << (FP8_ROUNDING - 1)) - 1)
    code += magnitude
    code >>= FP8_ROUNDING
    code -= np.uint32(FP8_BIAS)
    # Subnormal numbers are evenly spaced; 8 steps give the code of the smallest normal number.
    small = magnitude.view(np.float32) < np.float32(2.0**-6)
    if small.any():
        code[small] = np.rint(magnitude.view(np.float32)[small] / FP8_STEP).astype(np.uint32)
    code |= ((bits >> 24) & np.uint32(0x80)) * (code > 0)
    return code.astype(np.uint8).view(np.int8)
