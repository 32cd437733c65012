"""Quantised tensors as files hold them, made from random bytes; and each format's definition, one value at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """How a matrix "w", or all experts "e", are stored: `quantization_config`, stored tensors, and values."""

    settings: dict
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]
    value: Callable[[dict[str, np.ndarray], tuple[int, ...]], float]
    shape: tuple[int, ...]
    name: str = "w.weight"


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


def _nvfp4(shape: tuple[int, ...], axis: int, names: tuple[str, str, str], factors: tuple[int, ...]) -> Any:
    """Random bytes of packed 4-bit floats with a scale per 16 of them, and factors of the whole."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        values, scales = list(shape), list(shape)
        values[axis], scales[axis] = shape[axis] // 2, shape[axis] // 16
        return {
            names[0]: rng.integers(0, 256, values, dtype=np.uint8),
            names[1]: _fp8(rng, tuple(scales)),
            names[2]: _scales(rng, factors, np.dtype(np.float32)),
        }

    return make


def _nvfp4_value(axis: int, names: tuple[str, str, str], *, divides: bool = False) -> Any:
    def value(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
        byte, group = list(at), list(at)
        byte[axis], group[axis] = at[axis] // 2, at[axis] // 16
        bits = int(stored[names[0]][tuple(byte)]) >> 4 * (at[axis] % 2) & 15
        number = -FP4[bits - 8] if bits >= 8 else FP4[bits]
        factors = stored[names[2]].reshape(-1)
        factor = float(factors[at[0] % len(factors)])
        scaled = number * float(stored[names[1]][tuple(group)])
        return scaled / factor if divides else scaled * factor

    return value


def _mxfp4_of_matrix(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "w.weight_packed": rng.integers(0, 256, (5, 32), dtype=np.uint8),
        "w.weight_scale": rng.integers(110, 130, (5, 2), dtype=np.uint8),
    }


def _mxfp4_of_matrix_value(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
    row, column = at
    bits = int(stored["w.weight_packed"][row, column // 2]) >> 4 * (column % 2) & 15
    return (-FP4[bits - 8] if bits >= 8 else FP4[bits]) * 2.0 ** (
        int(stored["w.weight_scale"][row, column // 32]) - 127
    )


def _of_rows(stored: dict[str, np.ndarray], at: tuple[int, ...]) -> float:
    return float(stored["w.weight"][at]) * float(stored["w.weight_scale"][at[0] % len(stored["w.weight_scale"])].item())


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
PACKED_FLOATS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}},
    "ignore": ["lm_head"],
}
_OF_MODELOPT = ("w.weight", "w.weight_scale", "w.weight_scale_2")
_OF_COMPRESSED = ("w.weight_packed", "w.weight_scale", "w.weight_global_scale")
_OF_EXPERTS = ("e.up_proj", "e.up_proj_weight_scale", "e.up_proj_weight_scale_2")

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
    "mxfp4 of a matrix": Format(
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        _mxfp4_of_matrix,
        _mxfp4_of_matrix_value,
        (5, 64),
    ),
    "nvfp4": Format(MODELOPT, _nvfp4((7, 48), -1, _OF_MODELOPT, ()), _nvfp4_value(-1, _OF_MODELOPT), (7, 48)),
    "nvfp4 with a divisor": Format(
        PACKED_FLOATS,
        _nvfp4((7, 48), -1, _OF_COMPRESSED, (1,)),
        _nvfp4_value(-1, _OF_COMPRESSED, divides=True),
        (7, 48),
    ),
    "nvfp4 of all experts": Format(
        MODELOPT, _nvfp4((3, 6, 32), -1, _OF_EXPERTS, ()), _nvfp4_value(-1, _OF_EXPERTS), (3, 6, 32), _OF_EXPERTS[0]
    ),
    "nvfp4 of each expert": Format(
        {"quant_method": "modelopt", "quantization": MODELOPT},
        _nvfp4((3, 6, 32), -1, _OF_EXPERTS, (3, 1)),
        _nvfp4_value(-1, _OF_EXPERTS),
        (3, 6, 32),
        _OF_EXPERTS[0],
    ),
    "nvfp4 packed by rows": Format(
        MODELOPT, _nvfp4((3, 32, 6), -2, _OF_EXPERTS, (3,)), _nvfp4_value(-2, _OF_EXPERTS), (3, 32, 6), _OF_EXPERTS[0]
    ),
    "block fp8 of all experts": Format(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda rng: {
            "e.up_proj": _fp8(rng, (3, 37, 50)),
            "e.up_proj_scale_inv": _scales(rng, (3, 3, 4), np.dtype(np.float32)),
        },
        lambda stored, at: (
            float(stored["e.up_proj"][at]) * float(stored["e.up_proj_scale_inv"][at[0], at[1] // 16, at[2] // 16])
        ),
        (3, 37, 50),
        "e.up_proj",
    ),
    "fp8 of each expert": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda rng: {
            "e.up_proj": _fp8(rng, (3, 9, 21)),
            "e.up_proj_scale_inv": _scales(rng, (3, 1, 1), np.dtype(np.float32)),
            "e.up_proj_activation_scale": np.ones(3, np.float32),
        },
        lambda stored, at: float(stored["e.up_proj"][at]) * float(stored["e.up_proj_scale_inv"][at[0], 0, 0]),
        (3, 9, 21),
        "e.up_proj",
    ),
    "fp8 of modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda rng: {
            "w.weight": _fp8(rng, (9, 21)),
            "w.weight_scale": _scales(rng, (), np.dtype(np.float32)),
            "w.input_scale": np.ones((), np.float32),
        },
        lambda stored, at: float(stored["w.weight"][at]) * float(stored["w.weight_scale"]),
        (9, 21),
    ),
}


def store_as(form: str, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Stored tensors of a decoded one of any shape that the format can hold, by the names that files give them."""
    *leading, rows, columns = shape
    if form == "block fp8":
        blocks = *leading, -(-rows // 128), -(-columns // 128)
        return {name: _fp8(rng, shape), f"{name}_scale_inv": _scales(rng, blocks, np.dtype(np.float32))}
    if form == "int8 by rows":
        return {name: rng.integers(-128, 128, shape, dtype=np.int8), f"{name}_scale": _scales(rng, (rows, 1), BF16)}
    if form == "int4 by groups":
        words = rng.integers(-(2**31), 2**31, (rows, columns // 8), dtype=np.int64).astype(np.int32)
        return {f"{name}_packed": words, f"{name}_scale": _scales(rng, (rows, columns // 32), BF16)}
    if form in ("nvfp4", "nvfp4 with a divisor"):
        factors = () if form == "nvfp4" and not leading else tuple(leading) or (1,)
        return _nvfp4(shape, -1, parts_of(form, name), factors)(rng)
    if form == "mxfp4 of a matrix":
        values, scales, _ = parts_of(form, name)
        return {
            values: rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            scales: rng.integers(110, 130, (rows, columns // 32), dtype=np.uint8),
        }
    assert form == "mxfp4"
    blocks = shape[0], columns, rows // 32
    return {
        f"{name}_blocks": rng.integers(0, 256, (*blocks, 16), dtype=np.uint8),
        f"{name}_scales": rng.integers(110, 130, blocks, dtype=np.uint8),
    }


def parts_of(form: str, name: str) -> tuple[str, str, str]:
    """The names of packed 4-bit floats, their scales and their factor."""
    if form == "nvfp4":
        scale = f"{name}_scale" if name.endswith("weight") else f"{name}_weight_scale"
        return name, scale, f"{scale}_2"
    return f"{name}_packed", f"{name}_scale", f"{name}_global_scale"


def decode_whole(form: str, name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
    """The values of a tensor of `store_as`, float32, by the tables of ml_dtypes and in float64."""
    if form == "block fp8":
        values, scales = (stored[each].astype(np.float64) for each in (name, f"{name}_scale_inv"))
        return (values * _repeated(scales, 128, values.shape)).astype(np.float32)
    if form == "int4 by groups":
        words = stored[f"{name}_packed"].view(np.uint32)
        digits = [(words >> np.uint32(4 * place) & np.uint32(15)).astype(np.float64) - 8 for place in range(8)]
        values = np.stack(digits, axis=-1).reshape(len(words), -1)
        return (values * np.repeat(stored[f"{name}_scale"].astype(np.float64), 32, axis=1)).astype(np.float32)
    packed, scale, factor = parts_of(form, name)
    codes = np.stack([stored[packed] & 15, stored[packed] >> 4], axis=-1).reshape(*stored[packed].shape[:-1], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if form == "mxfp4 of a matrix":
        scales = stored[scale].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return (values * np.repeat(scales, 32, axis=-1)).astype(np.float32)
    values *= np.repeat(stored[scale].astype(np.float64), 16, axis=-1)
    number = stored[factor].astype(np.float64).reshape(*stored[factor].shape[:1], *(1,) * (values.ndim - 1))
    return (values / number if form == "nvfp4 with a divisor" else values * number).astype(np.float32)


def _repeated(scales: np.ndarray, size: int, shape: tuple[int, ...]) -> np.ndarray:
    """The scales of squares of `size` for each value."""
    wide = np.repeat(np.repeat(scales, size, axis=-2), size, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]
