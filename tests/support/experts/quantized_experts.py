"""Experts in 8 bits by the definition, in numpy: numbers and scales, and checkpoints of them or what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CONFIG_FILE, SINGLE_FILE, open_checkpoint
from rayserve_moe.kernels.narrow_weights import scale_rows
from rayserve_moe.kernels.reference.expert_products import ExpertWeights

EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+\.weight")


def by_hand(values_IO: np.ndarray, dtype: str = "int8") -> tuple[np.ndarray, np.ndarray]:
    """Numbers [..., I, O] and scales [..., 1, O]: 127 steps to the largest of each column, or 448 of e4m3."""
    is_int8 = dtype == "int8"
    scales = np.abs(values_IO).max(axis=-2, keepdims=True).astype(np.float32) / np.float32(127 if is_int8 else 448)
    steps = values_IO.astype(np.float32) / np.where(scales > 0, scales, 1)
    return (np.rint(steps).astype(np.int8) if is_int8 else steps.astype(ml_dtypes.float8_e4m3fn)), scales


def dequantized(path: Path, directory: Path, dtype: str = "int8") -> Path:
    """Copy a float32 Qwen3-MoE checkpoint in one file, its experts as int8, or fp8, has them."""
    copy = shutil.copytree(path, directory)
    tensors = load_file(copy / SINGLE_FILE)
    for name, tensor_OI in tensors.items():
        if EXPERT.fullmatch(name):
            values, scales = by_hand(tensor_OI.T, dtype)
            tensors[name] = np.ascontiguousarray((values.astype(np.float32) * scales).T)
    save_file(tensors, copy / SINGLE_FILE)
    return copy


def random_experts(
    num_slots: int,
    width: int,
    inner: int,
    *,
    seed: int,
    powers_of_two: bool = False,
    dtype: str = "int8",
    has_blocks: bool = False,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts in 8 bits, and the same as plain float32 numbers, which are exact where scales are powers of two.

    With scales of columns, or of their blocks of rows.
    """
    generator = np.random.default_rng(seed)
    matrices, scales = [], []
    for size_I, size_O in ((width, inner), (width, inner), (inner, width)):
        matrices.append(_random_numbers(generator, (num_slots, size_I, size_O), dtype))
        num_scales = scale_rows(size_I) if has_blocks else 1
        exponents = generator.integers(-9, -6, (num_slots, num_scales, size_O)).astype(np.float32)
        scales.append(np.exp2(exponents if powers_of_two else exponents - generator.random(exponents.shape)))
    scales = [scale.astype(np.float32) for scale in scales]
    of_rows = (
        np.repeat(s, 128, axis=1)[:, : m.shape[1]] if has_blocks else s for m, s in zip(matrices, scales, strict=True)
    )
    wide = (values.astype(np.float32) * scale for values, scale in zip(matrices, of_rows, strict=True))
    quantized = ExpertWeights(*map(jnp.asarray, matrices), None, None, None, *map(jnp.asarray, scales))
    return quantized, ExpertWeights(*map(jnp.asarray, wide))


def _random_numbers(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """All numbers that weights of 8 bits are, subnormal ones too: no NaNs, no zero with a sign, and not -128."""
    if dtype == "int8":
        return generator.integers(-127, 128, shape).astype(np.int8)
    magnitudes = generator.integers(0, 0x7F, shape) | generator.integers(0, 2, shape) << 7
    return np.where(magnitudes == 0x80, 0, magnitudes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


def blocks_by_hand(values_OI: np.ndarray, dtype: str = "float8_e4m3fn") -> tuple[np.ndarray, np.ndarray]:
    """Numbers of 8 bits [O, I] and scales of squares of 128, [O / 128, I / 128], as files hold them."""
    largest = 448 if dtype == "float8_e4m3fn" else 127
    shape = tuple(-(-size // 128) for size in values_OI.shape)
    values, scales = np.zeros(values_OI.shape, ml_dtypes.float8_e4m3fn if largest == 448 else np.int8), np.zeros(shape)
    for o, i in np.ndindex(shape):
        at = slice(128 * o, 128 * o + 128), slice(128 * i, 128 * i + 128)
        scales[o, i] = np.float32(np.abs(values_OI[at]).max()) / np.float32(largest)
        steps = values_OI[at].astype(np.float32) / np.float32(scales[o, i] or 1)
        values[at] = steps.astype(values.dtype) if largest == 448 else np.rint(steps).astype(np.int8)
    return values, scales.astype(np.float32)


def stored_in_blocks(path: Path, directory: Path, dtype: str = "float8_e4m3fn") -> Path:
    """Copy a Qwen3-MoE checkpoint into one file, its experts in squares of 128 with a scale for each."""
    copy = shutil.copytree(path, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    files, stored = open_checkpoint(path), dict[str, np.ndarray]()
    scale_name = "_scale_inv" if dtype == "float8_e4m3fn" else "_scale"
    for name in files.tensors:
        stored[name] = tensor_OI = files.read(name)
        if EXPERT.fullmatch(name):
            stored[name], stored[name + scale_name] = blocks_by_hand(tensor_OI.astype(np.float32), dtype)
    save_file(stored, copy / SINGLE_FILE)
    config = json.loads((copy / CONFIG_FILE).read_text())
    config["quantization_config"] = BLOCK_SETTINGS[dtype]
    (copy / CONFIG_FILE).write_text(json.dumps(config))
    return copy


_INT8_BLOCKS = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
BLOCK_SETTINGS = {
    "float8_e4m3fn": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": _INT8_BLOCKS}}},
}
