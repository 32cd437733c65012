"""Quantised tensors of a checkpoint: their parts, and the decoding of a slice while it is read.

Values are looked up and scaled in float32. Every product below is exact or rounded once, so the cast to the served
dtype yields the numbers that the format defines. A slice reads only its own values and scales; nothing is decoded
whole.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from rayserve_moe.checkpoints.header import DTYPES as FLOATING
from rayserve_moe.checkpoints.header import CheckpointError, TensorEntry

Bounds = tuple[tuple[int, int], ...]
"""`[from, to)` for each dimension."""
ReadStored = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Reads a slice of a tensor as files hold it."""

ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Scales of activations and caches, which are not quantised here."""
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
VALUES_OF = {"F8_E4M3": FP8, "I8": INT8}


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
        with np.errstate(over="ignore", invalid="ignore"):  # the caller rejects values that are not finite
            return self.decode(read, tuple((start, stop) for start, stop, _ in bounds))


def find_quantized(config: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> dict[str, QuantizedTensor]:
    """Find the tensors that `quantization_config` describes among the `stored` ones; return decoded tensors by name.

    Block fp8 (`fp8`: DeepSeek, MiniMax, Qwen3), MXFP4 (`mxfp4`: gpt-oss; OCP Microscaling Formats 1.0) and
    `compressed-tensors` with symmetric int4 (Kimi), int8 or fp8 weights. Raises CheckpointError for any other method,
    and if no tensor is quantised that way.
    """
    settings = config.get("quantization_config")
    if not settings:
        return {}
    method = settings.get("quant_method")
    finder = FINDERS.get(method) if isinstance(method, str) else None
    if finder is None:
        raise CheckpointError(
            f"config.json: quantization_config.quant_method = {str(method)[:80]!r} is not supported "
            f"(only {', '.join(FINDERS)})"
        )
    found = dict(finder(settings, stored))
    if not found:
        raise CheckpointError(
            f"config.json: quantization_config.quant_method = {method!r}, but no tensor is stored that way; "
            "remove quantization_config from config.json if weights are not quantised"
        )
    return found


def decoded_entries(
    stored: Mapping[str, TensorEntry], quantized: Mapping[str, QuantizedTensor]
) -> dict[str, TensorEntry]:
    """Return the entries that a reader sees: decoded tensors as float32, without their parts."""
    hidden = {part for tensor in quantized.values() for part in tensor.parts}
    if quantized:
        hidden |= {name for name in stored if name.endswith(ACTIVATION_SCALES)}
    seen = {name: entry for name, entry in stored.items() if name not in hidden}
    for name, tensor in quantized.items():
        seen[name] = replace(stored[tensor.parts[0]], name=name, dtype="F32", shape=tensor.shape)
    return seen


def _find_block_fp8(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[_Found]:
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise CheckpointError(f"config.json: weight_block_size must be two positive sizes, found {str(block)[:80]}")
    blocks = ((block[0], block[1]),) if block else ()
    for name, entry in stored.items():
        if name.endswith("weight_scale_inv"):
            yield _bytes(name.removesuffix("_scale_inv"), name, stored, blocks)
        elif entry.dtype == "F8_E4M3" and f"{name}_scale_inv" not in stored:
            raise CheckpointError(f"{entry.file.name}: {name} is F8_E4M3, but its scale {name}_scale_inv is missing")


def _find_mxfp4(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[_Found]:
    for blocks in stored:
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        num_experts, out, groups, half = _shape_of(blocks, stored, ("U8",), 4)
        if _shape_of(scales := f"{name}_scales", stored, ("U8",), 3) != (num_experts, out, groups):
            raise CheckpointError(
                f"{stored[scales].file.name}: {scales} does not have a scale for each block of {blocks}"
            )
        decode = partial(_decode_mxfp4, parts=(blocks, scales), width=2 * half)
        yield name, QuantizedTensor((num_experts, 2 * half * groups, out), (blocks, scales), decode, row_dim=-1)


def _find_compressed(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[_Found]:
    groups, blocks = settings.get("config_groups"), list[_Block | None]()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        blocks.append(_declared_block(weights))
        if weights.get("symmetric", True) is not True:
            raise CheckpointError("config.json: compressed-tensors weights with zero points are not supported")
        if settings.get("format") == "pack-quantized" and (bits := weights.get("num_bits", 4)) != 4:
            raise CheckpointError(
                f"config.json: packed weights of {reprlib.repr(bits)} bits are not supported (only 4)"
            )
    for scale in stored:
        if scale.endswith("weight_scale"):
            name = scale.removesuffix("_scale")
            declared = tuple(block for block in blocks if block) if all(blocks) else ()
            yield (_packed if f"{name}_packed" in stored else _bytes)(name, scale, stored, declared)


def _declared_block(weights: Mapping[str, Any]) -> _Block | None:
    """Return the block of a `strategy` of compressed-tensors; None if it is not declared."""
    strategy, size, sizes = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "block" and isinstance(sizes, list) and len(sizes) == 2 and all(type(one) is int for one in sizes):
        return (sizes[0], sizes[1]) if min(sizes) > 0 else None
    if strategy == "group" and type(size) is int and size > 0:
        return 1, size
    return {"channel": (1, 0), "tensor": (0, 0)}.get(str(strategy))


FINDERS = {"fp8": _find_block_fp8, "mxfp4": _find_mxfp4, "compressed-tensors": _find_compressed}
_Found = tuple[str, QuantizedTensor]
_Block = tuple[int, int]
"""Rows and columns that share a scale; 0 stands for the whole dimension."""


def _bytes(name: str, scale: str, stored: Mapping[str, TensorEntry], blocks: tuple[_Block, ...]) -> _Found:
    """Return a decoded matrix with a byte per value."""
    shape = _shape_of(name, stored, tuple(VALUES_OF), 2)
    table, block = VALUES_OF[stored[name].dtype], _block_of(shape, scale, stored, blocks)
    return name, QuantizedTensor(
        shape, (name, scale), partial(_decode_bytes, parts=(name, scale), table=table, block=block), block=block
    )


def _packed(name: str, scale: str, stored: Mapping[str, TensorEntry], blocks: tuple[_Block, ...]) -> _Found:
    """Return a decoded matrix with eight 4-bit values per word."""
    for part in (f"{name}_zero_point", f"{name}_g_idx"):
        if part in stored:
            raise CheckpointError(
                f"{stored[part].file.name}: {part}: zero points and reordered groups are not supported"
            )
    rows, words = _shape_of(packed := f"{name}_packed", stored, ("I32",), 2)
    shape = (rows, words * NIBBLES_PER_WORD)
    parts = (packed, scale, *(part for part in (f"{name}_shape",) if part in stored))
    block = _block_of(shape, scale, stored, blocks)
    return name, QuantizedTensor(shape, parts, partial(_decode_packed, parts=(packed, scale), block=block))


def _shape_of(name: str, stored: Mapping[str, TensorEntry], dtypes: tuple[str, ...], num_dims: int) -> tuple[int, ...]:
    entry = stored.get(name)
    if entry is None or entry.dtype not in dtypes or len(entry.shape) != num_dims or 0 in entry.shape:
        found = "nothing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)} in {entry.file.name}"
        raise CheckpointError(
            f"quantised tensor {name} must be {' or '.join(dtypes)} with {num_dims} dimensions, found {found}"
        )
    return entry.shape


def _block_of(
    shape: tuple[int, ...], scale: str, stored: Mapping[str, TensorEntry], blocks: tuple[_Block, ...]
) -> _Block:
    """Return the block size that divides a matrix into the shape of its scales; derive it if `blocks` is empty."""
    entry = stored[scale]
    grid = (1, 1) if math.prod(entry.shape) == 1 else entry.shape
    sizes = [(rows or shape[0], columns or shape[1]) for rows, columns in blocks]
    if not blocks and len(grid) == 2 and all(grid):
        sizes = [(-(-shape[0] // grid[0]), -(-shape[1] // grid[1]))]
    for block in sizes if entry.dtype in FLOATING else ():
        if grid == tuple(-(-size // part) for size, part in zip(shape, block, strict=True)):
            return block
    raise CheckpointError(
        f"{entry.file.name}: {scale}, {entry.dtype} of shape {list(entry.shape)}, does not match a matrix of shape "
        f"{list(shape)}" + (f" in blocks of {' or '.join(str(list(size)) for size in sizes)}" if sizes else "")
    )


def _decode_bytes(
    read: ReadStored, bounds: Bounds, *, parts: tuple[str, str], table: np.ndarray, block: _Block
) -> np.ndarray:
    name, scale = parts
    stored = read(name, tuple(slice(*bound) for bound in bounds))
    return _scaled(table[stored.view(np.uint8)], read, scale, block=block, bounds=bounds)


def _decode_packed(read: ReadStored, bounds: Bounds, *, parts: tuple[str, str], block: _Block) -> np.ndarray:
    (packed, scale), (rows, (start, stop)) = parts, bounds
    words = slice(start // NIBBLES_PER_WORD, -(-stop // NIBBLES_PER_WORD))
    stored = np.ascontiguousarray(read(packed, (slice(*rows), words))).view(np.uint8)
    values = INT4_PAIRS[stored].reshape(len(stored), -1)
    first = words.start * NIBBLES_PER_WORD
    return _scaled(values[:, start - first : stop - first], read, scale, block=block, bounds=bounds)


def _scaled(values: np.ndarray, read: ReadStored, scale: str, *, block: _Block, bounds: Bounds) -> np.ndarray:
    """Multiply the values within `bounds` by the scales of their blocks, in place."""
    rows, columns = (np.arange(*bound) // size for bound, size in zip(bounds, block, strict=True))
    first, last = int(rows[0]), int(rows[-1])
    scales = read(scale, (slice(first, last + 1),))
    if scales.size == 1:
        return np.multiply(values, scales.reshape(()).astype(np.float32), out=values)
    return np.multiply(values, scales.astype(np.float32)[np.ix_(rows - first, columns)], out=values)


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
