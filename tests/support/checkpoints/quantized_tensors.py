"""Quantised tensors as files hold them, made from random bytes; and each format's definition, one value at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """How a matrix "w" is stored: its `quantization_config`, its stored tensors, and its values."""

    settings: dict
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]
    value: Callable[[dict[str, np.ndarray], tuple[int, ...]], float]
    shape: tuple[int, ...]


def _fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bits = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(bits & 0x7F == 0x7F, 0, bits).astype(np.uint8).view(FP8)  # the format's NaNs


def _scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.uniform(0.001, 0.1, shape).astype(dtype)


def _block_fp8(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"w.weight": _fp8(rng, (37, 50)), "w.weight_scale_inv": _scales(rng, (3, 4), np.dtype(np.float32))}


def _int4(rng: np.random.Generator) -> dict[str, np.ndarray]:
    words = rng.integers(-(2**31), 2**31, (7, 8), dtype=np.int64).astype(np.int32)
    scales = _scales(rng, (7, 2), BF16)
    return {"w.weight_packed": words, "w.weight_scale": scales, "w.weight_shape": np.array([7, 64], np.int64)}


def _int8(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "w.weight": rng.integers(-128, 128, (9, 21), dtype=np.int8),
        "w.weight_scale": _scales(rng, (9, 1), BF16),
        "w.input_scale": np.ones(1, np.float32),
    }


def _whole_fp8(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"w.weight": _fp8(rng, (9, 21)), "w.weight_scale": _scales(rng, (1,), np.dtype(np.float32))}


def _mxfp4(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "w.weight_blocks": rng.integers(0, 256, (3, 6, 2, 16), dtype=np.uint8),
        "w.weight_scales": rng.integers(110, 130, (3, 6, 2), dtype=np.uint8),
    }


def _int4_value(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
    row, column = at
    bits = int(stored["w.weight_packed"].view(np.uint32)[row, column // 8]) >> 4 * (column % 8) & 15
    return (bits - 8) * float(stored["w.weight_scale"][row, column // 32])


def _mxfp4_value(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
    expert, column, row = at
    group, place = divmod(column, 32)
    byte = int(stored["w.weight_blocks"][expert, row, group, place // 2])
    bits = byte >> 4 if place % 2 else byte & 15
    value = -FP4[bits - 8] if bits >= 8 else FP4[bits]
    return value * 2.0 ** (int(stored["w.weight_scales"][expert, row, group]) - 127)


def _of_rows(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
    return float(stored["w.weight"][at]) * float(stored["w.weight_scale"][at[0] % len(stored["w.weight_scale"])].item())


FORMATS = {
    "block fp8": Format(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        _block_fp8,
        lambda stored, at: (
            float(stored["w.weight"][at]) * float(stored["w.weight_scale_inv"][at[0] // 16, at[1] // 16])
        ),
        (37, 50),
    ),
    "int4 by groups": Format({"quant_method": "compressed-tensors"}, _int4, _int4_value, (7, 64)),
    "int8 by rows": Format({"quant_method": "compressed-tensors"}, _int8, _of_rows, (9, 21)),
    "fp8 with one scale": Format(
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"symmetric": True}}}},
        _whole_fp8,
        lambda stored, at: float(stored["w.weight"][at]) * float(stored["w.weight_scale"][0]),
        (9, 21),
    ),
    "mxfp4": Format({"quant_method": "mxfp4"}, _mxfp4, _mxfp4_value, (3, 64, 6)),
}


def store_as(form: str, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Stored tensors of a decoded one of any shape that the format can hold, by the names that files give them."""
    rows, columns = shape[-2:]
    if form == "block fp8":
        blocks = -(-rows // 128), -(-columns // 128)
        return {name: _fp8(rng, shape), f"{name}_scale_inv": _scales(rng, blocks, np.dtype(np.float32))}
    if form == "int8 by rows":
        return {name: rng.integers(-128, 128, shape, dtype=np.int8), f"{name}_scale": _scales(rng, (rows, 1), BF16)}
    if form == "int4 by groups":
        words = rng.integers(-(2**31), 2**31, (rows, columns // 8), dtype=np.int64).astype(np.int32)
        return {f"{name}_packed": words, f"{name}_scale": _scales(rng, (rows, columns // 32), BF16)}
    assert form == "mxfp4"
    blocks = shape[0], columns, rows // 32
    return {
        f"{name}_blocks": rng.integers(0, 256, (*blocks, 16), dtype=np.uint8),
        f"{name}_scales": rng.integers(110, 130, blocks, dtype=np.uint8),
    }
