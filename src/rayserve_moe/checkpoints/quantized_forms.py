"""Forms of quantised tensors in files, and the decoding of a slice while it is read.

Values are looked up and scaled in float32. Every product below is exact or rounded once, so the cast to the served
dtype yields the numbers that the format defines. A slice reads only its own values and scales; nothing is decoded
whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from rayserve_moe.checkpoints.header import DTYPES as FLOATING
from rayserve_moe.checkpoints.header import CheckpointError, TensorEntry

Bounds = tuple[tuple[int, int], ...]
"""`[from, to)` for each dimension."""
ReadStored = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Reads a slice of a tensor as files hold it."""
NIBBLES_PER_WORD = 8
_BYTES = np.arange(256, dtype=np.uint8)
FP8 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
INT8 = _BYTES.view(np.int8).astype(np.float32)
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4_PAIRS = np.stack([np.concatenate([_FP4, -_FP4])[nibble] for nibble in (_BYTES & 15, _BYTES >> 4)], axis=-1)
INT4_PAIRS = np.stack([(nibble.astype(np.float32) - 8) for nibble in (_BYTES & 15, _BYTES >> 4)], axis=-1)
"""Two values per byte, float32 [256, 2], the low half first."""
NAN_OF_SCALES = 255
"""The NaN of MXFP4's scales: E8M0 has a single NaN and no infinities."""
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(NAN_OF_SCALES) - 127), np.float32(np.nan))
VALUES_OF = {"F8_E4M3": FP8, "I8": INT8}
FP4_SCALES = {"F8_E4M3": (FP8, 16), "U8": (E8M0, 32)}
"""Scales of packed 4-bit floats by their dtype, NVFP4 and MXFP4, and the number of values that share one."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A decoded tensor."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """The tensors that hold it."""
    decode: Callable[[ReadStored, Bounds], np.ndarray]
    """`decode(read, bounds)` returns float32."""
    row_dim: int = -2
    """The dimension whose parts are contiguous in the file."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale, for a matrix that is stored as bytes of its shape and such scales."""

    def read(self, read: ReadStored, index: tuple[slice, ...]) -> np.ndarray:
        """Decode `tensor[index]`; `index` holds a slice per leading dimension, without steps."""
        whole = (*index, *(slice(None) for _ in self.shape[len(index) :]))
        bounds = [part.indices(size) for part, size in zip(whole, self.shape, strict=True)]
        assert all(step == 1 for *_, step in bounds), "a decoded slice is contiguous"
        if any(stop <= start for start, stop, _ in bounds):
            return np.empty([max(0, stop - start) for start, stop, _ in bounds], np.float32)
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # the caller rejects values that are not finite
            return self.decode(read, tuple((start, stop) for start, stop, _ in bounds))


Found = tuple[str, QuantizedTensor]
Block = tuple[int, int]
"""Rows and columns that share a scale; 0 stands for the whole dimension."""


def in_bytes(name: str, scale: str, *, stored: Mapping[str, TensorEntry], blocks: tuple[Block, ...]) -> Found:
    """Return a decoded matrix, or the matrices of all experts, with a byte per value."""
    shape = _shape_of(name, stored, tuple(VALUES_OF), (2, 3))
    table, scales = VALUES_OF[stored[name].dtype], _scales_of(shape, scale, stored, blocks)
    # A block is used where its scales are read by rows and columns.
    block = scales.block if len(scales.shape) == len(shape) else (0, 0)
    return name, QuantizedTensor(
        shape, (name, scale), partial(_decode_bytes, name=name, scales=scales, table=table), block=block
    )


def in_fp4(name: str, parts: tuple[str, str, str], *, stored: Mapping[str, TensorEntry], divides: bool) -> Found:
    """Return a decoded matrix, or those of all experts, with two 4-bit floats per byte: NVFP4 or MXFP4.

    `parts` are the values, a scale per group of them, and for NVFP4 a factor of the tensor, or a divisor if `divides`.
    Values of all experts are packed along either of their last two dimensions, as are their groups.
    """
    values, scale, factor = parts
    packed = _shape_of(values, stored, ("U8",), (2, 3))
    grid = _shape_of(scale, stored, tuple(FP4_SCALES), (len(packed),))
    table, width = FP4_SCALES[stored[scale].dtype]
    for axis in (-1, -2)[: len(packed) - 1]:
        shape, grouped = list(packed), list(packed)
        shape[axis] = 2 * packed[axis]
        grouped[axis] = shape[axis] // width
        if shape[axis] % width == 0 and grid == tuple(grouped):
            break
    else:
        raise CheckpointError(
            f"{stored[scale].file.name}: {scale}, {stored[scale].dtype} of shape {list(grid)}, does not have a scale "
            f"for each group of {width} values of {values}, {list(packed)} bytes"
        )
    has_factor = stored[scale].dtype != "U8"
    if has_factor:
        _check_factor(factor, stored, packed[:-2])
    held = parts if has_factor else parts[:2]
    decode = partial(_decode_fp4, parts=held, groups=_Groups(table, width, axis), divides=divides)
    return name, QuantizedTensor(tuple(shape), held, decode)


@dataclass(frozen=True)
class _Groups:
    """Groups of values that share a scale."""

    scales: np.ndarray
    """The scale of each byte."""
    width: int
    axis: int


def _check_factor(name: str, stored: Mapping[str, TensorEntry], leading: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor holds a number, or a number per expert of `leading`."""
    found = "nothing"
    if (entry := stored.get(name)) is not None:
        found = f"{entry.dtype} of shape {list(entry.shape)} in {entry.file.name}"
        if entry.dtype == "F32" and (
            math.prod(entry.shape) == 1 or (entry.shape[:1] == leading and math.prod(entry.shape) == leading[0])
        ):
            return
    each = f" or {leading[0]} of them" if leading else ""
    raise CheckpointError(f"quantised tensor {name} must be one F32 number{each}, found {found}")


def in_words(name: str, scale: str, *, stored: Mapping[str, TensorEntry], blocks: tuple[Block, ...]) -> Found:
    """Return a decoded matrix with eight 4-bit values per word."""
    for part in (f"{name}_zero_point", f"{name}_g_idx"):
        if part in stored:
            raise CheckpointError(
                f"{stored[part].file.name}: {part}: zero points and reordered groups are not supported"
            )
    rows, words = _shape_of(packed := f"{name}_packed", stored, ("I32",), (2,))
    shape = (rows, words * NIBBLES_PER_WORD)
    parts = (packed, scale, *(part for part in (f"{name}_shape",) if part in stored))
    scales = _scales_of(shape, scale, stored, blocks)
    return name, QuantizedTensor(shape, parts, partial(_decode_packed, packed=packed, scales=scales))


def in_blocks(name: str, stored: Mapping[str, TensorEntry]) -> Found:
    """Return the decoded matrices of all experts, [experts, in, out], from blocks of MXFP4 and their scales."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    num_experts, out, groups, half = _shape_of(blocks, stored, ("U8",), (4,))
    if _shape_of(scales, stored, ("U8",), (3,)) != (num_experts, out, groups):
        raise CheckpointError(f"{stored[scales].file.name}: {scales} does not have a scale for each block of {blocks}")
    decode = partial(_decode_mxfp4, parts=(blocks, scales), width=2 * half)
    return name, QuantizedTensor((num_experts, 2 * half * groups, out), (blocks, scales), decode, row_dim=-1)


def _shape_of(
    name: str, stored: Mapping[str, TensorEntry], dtypes: tuple[str, ...], num_dims: tuple[int, ...]
) -> tuple[int, ...]:
    entry = stored.get(name)
    if entry is None or entry.dtype not in dtypes or len(entry.shape) not in num_dims or 0 in entry.shape:
        found = "nothing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)} in {entry.file.name}"
        raise CheckpointError(
            f"quantised tensor {name} must be {' or '.join(dtypes)} with {' or '.join(map(str, num_dims))} dimensions, "
            f"found {found}"
        )
    return entry.shape


@dataclass(frozen=True)
class _Scales:
    """The scales of a matrix, or of the matrices of all experts."""

    name: str
    shape: tuple[int, ...]
    """Without the last dimensions if a matrix has a single scale."""
    block: Block


def _scales_of(
    shape: tuple[int, ...], scale: str, stored: Mapping[str, TensorEntry], blocks: tuple[Block, ...]
) -> _Scales:
    """Return scales with the block size that divides a matrix into their shape; derive it if `blocks` is empty."""
    entry, leading = stored[scale], shape[:-2]
    of_matrix = entry.shape[len(leading) :] if entry.shape[: len(leading)] == leading else None
    is_single = math.prod(entry.shape) == 1 or (of_matrix is not None and math.prod(of_matrix) == 1)
    grid = (1, 1) if is_single else of_matrix or ()
    sizes = [(rows or shape[-2], columns or shape[-1]) for rows, columns in blocks]
    if not blocks and len(grid) == 2 and all(grid):
        sizes = [(-(-shape[-2] // grid[0]), -(-shape[-1] // grid[1]))]
    for block in sizes if entry.dtype in FLOATING else ():
        if grid == tuple(-(-size // part) for size, part in zip(shape[-2:], block, strict=True)):
            return _Scales(scale, entry.shape, block)
    raise CheckpointError(
        f"{entry.file.name}: {scale}, {entry.dtype} of shape {list(entry.shape)}, does not match a matrix of shape "
        f"{list(shape)}" + (f" in blocks of {' or '.join(str(list(size)) for size in sizes)}" if sizes else "")
    )


def _decode_bytes(read: ReadStored, bounds: Bounds, *, name: str, scales: _Scales, table: np.ndarray) -> np.ndarray:
    stored = read(name, tuple(slice(*bound) for bound in bounds))
    return _scaled(table[stored.view(np.uint8)], read, scales, bounds=bounds)


def _decode_packed(read: ReadStored, bounds: Bounds, *, packed: str, scales: _Scales) -> np.ndarray:
    rows, (start, stop) = bounds
    words = slice(start // NIBBLES_PER_WORD, -(-stop // NIBBLES_PER_WORD))
    stored = np.ascontiguousarray(read(packed, (slice(*rows), words))).view(np.uint8)
    values = INT4_PAIRS[stored].reshape(len(stored), -1)
    first = words.start * NIBBLES_PER_WORD
    return _scaled(values[:, start - first : stop - first], read, scales, bounds=bounds)


def _scaled(values: np.ndarray, read: ReadStored, scales: _Scales, *, bounds: Bounds) -> np.ndarray:
    """Multiply the values within `bounds` by the scales of their blocks, in place."""
    if math.prod(scales.shape) == 1:
        return np.multiply(values, read(scales.name, ()).reshape(()).astype(np.float32), out=values)
    rows, columns = (np.arange(*bound) // size for bound, size in zip(bounds[-2:], scales.block, strict=True))
    first, last = int(rows[0]), int(rows[-1])
    index = (*(slice(*bound) for bound in bounds[:-2]), slice(first, last + 1))
    found = read(scales.name, index[: len(scales.shape)]).astype(np.float32)
    found = found.reshape(*found.shape, *(1,) * (len(bounds) - found.ndim))
    return np.multiply(values, found[..., (rows - first)[:, None], columns], out=values)


def _decode_fp4(
    read: ReadStored, bounds: Bounds, *, parts: tuple[str, ...], groups: _Groups, divides: bool
) -> np.ndarray:
    """Decode all groups that the bounds touch, and return the values within the bounds."""
    (values, scale, *factor), axis, width = parts, groups.axis, groups.width
    start, stop = bounds[axis]
    first, last = start // width, -(-stop // width)

    def stored(name: str, size: int) -> np.ndarray:
        index = [slice(*bound) for bound in bounds]
        index[axis] = slice(first * size, last * size)
        return read(name, tuple(index))

    pairs = FP4_PAIRS[stored(values, width // 2)]
    scales = np.expand_dims(groups.scales[stored(scale, 1).view(np.uint8)], axis)
    in_groups = list(scales.shape)
    in_groups[axis] = width
    decoded = (pairs if axis == -1 else np.moveaxis(pairs, -1, -2)).reshape(in_groups)
    decoded = np.multiply(decoded, scales, out=decoded)
    sizes, within = [stop - start for start, stop in bounds], [slice(None)] * len(bounds)
    sizes[axis] = (last - first) * width
    within[axis] = slice(start - first * width, stop - first * width)
    decoded = decoded.reshape(sizes)[tuple(within)]
    if not factor:
        return decoded
    number = read(factor[0], ()).reshape(-1)
    number = number[slice(*bounds[0])].reshape(-1, 1, 1) if number.size > 1 else number.reshape(())
    return (np.divide if divides else np.multiply)(decoded, number, out=decoded)


def _decode_mxfp4(read: ReadStored, bounds: Bounds, *, parts: tuple[str, str], width: int) -> np.ndarray:
    """Decode [experts, in, out] from blocks stored as [experts, out, in / width, width / 2]."""
    (blocks, scales), (experts, (start, stop), out) = parts, bounds
    groups = slice(start // width, -(-stop // width))
    within = (slice(*experts), slice(*out), groups)
    values = FP4_PAIRS[read(blocks, within)].reshape(*(read_scales := read(scales, within)).shape, width)
    values = np.ldexp(values, read_scales.astype(np.int32)[..., None] - 127, out=values)
    values[read_scales == NAN_OF_SCALES] = np.nan
    values = values.reshape(*values.shape[:2], -1)[..., start - groups.start * width : stop - groups.start * width]
    return values.transpose(0, 2, 1)
