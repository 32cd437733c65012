"""Experts in int8 by the definition, in numpy: their integers and scales, and checkpoints of what those stand for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import SINGLE_FILE
from rayserve_moe.kernels.expert_products import ExpertWeights

EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+\.weight")


def by_hand(values_IO: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers [..., I, O] and scales [..., 1, O]: 127 steps to the largest of each column."""
    scales = np.abs(values_IO).max(axis=-2, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(values_IO.astype(np.float32) / np.where(scales > 0, scales, 1)).astype(np.int8), scales


def dequantized(path: Path, directory: Path) -> Path:
    """Copy a float32 Qwen3-MoE checkpoint in one file, its experts as int8 has them."""
    copy = shutil.copytree(path, directory)
    tensors = load_file(copy / SINGLE_FILE)
    for name, tensor_OI in tensors.items():
        if EXPERT.fullmatch(name):
            values, scales = by_hand(tensor_OI.T)
            tensors[name] = np.ascontiguousarray((values * scales).T)
    save_file(tensors, copy / SINGLE_FILE)
    return copy


def random_experts(
    num_slots: int, width: int, inner: int, *, seed: int, powers_of_two: bool = False
) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts in int8, and the same as plain float32 numbers, which are exact where scales are powers of two."""
    generator = np.random.default_rng(seed)
    integers, scales = [], []
    for size_I, size_O in ((width, inner), (width, inner), (inner, width)):
        integers.append(generator.integers(-127, 128, (num_slots, size_I, size_O)).astype(np.int8))
        exponents = generator.integers(-9, -6, (num_slots, 1, size_O)).astype(np.float32)
        scales.append(np.exp2(exponents if powers_of_two else exponents - generator.random(exponents.shape)))
    scales = [scale.astype(np.float32) for scale in scales]
    wide = (np.float32(values) * scale for values, scale in zip(integers, scales, strict=True))
    quantized = ExpertWeights(*map(jnp.asarray, integers), None, None, None, *map(jnp.asarray, scales))
    return quantized, ExpertWeights(*map(jnp.asarray, wide))
