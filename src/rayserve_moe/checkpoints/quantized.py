"""The quantised tensors of a checkpoint, found by the settings of its config."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.checkpoints.header import CheckpointError, TensorEntry
from rayserve_moe.checkpoints.quantized_forms import (
    Block,
    Found,
    QuantizedTensor,
    in_blocks,
    in_bytes,
    in_fp4,
    in_words,
)

ACTIVATION_SCALES = ("input_scale", "activation_scale", ".k_scale", ".v_scale", ".input_global_scale")
"""Endings of the names of scales of activations and caches, which are not quantised here."""
MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")


def find_quantized(config: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> dict[str, QuantizedTensor]:
    """Find the tensors that `quantization_config` describes among the `stored` ones; return decoded tensors by name.

    Block fp8 (`fp8`: DeepSeek, MiniMax, Qwen3), MXFP4 (`mxfp4`: gpt-oss; OCP Microscaling Formats 1.0),
    `compressed-tensors` with NVFP4, MXFP4, symmetric int4 (Kimi), int8 or fp8 weights, and `modelopt` with NVFP4 or fp8
    weights. Tensors that are stored plainly, as those that the settings exclude, are read as they are. Raises
    CheckpointError for any other method, and if no tensor is quantised that way.
    """
    settings = quantization_of(config)
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


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a `config.json` or of its `text_config`; empty if it has none.

    Raises CheckpointError if it is not an object.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = config.get("quantization_config") or inner or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"quantization_config must be an object, found {reprlib.repr(found)}")
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


def _find_block_fp8(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[Found]:
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise CheckpointError(f"config.json: weight_block_size must be two positive sizes, found {str(block)[:80]}")
    blocks = ((block[0], block[1]),) if block else ()
    for name, entry in stored.items():
        if name.endswith("_scale_inv"):
            yield in_bytes(name.removesuffix("_scale_inv"), name, stored=stored, blocks=blocks)
        elif entry.dtype == "F8_E4M3" and f"{name}_scale_inv" not in stored:
            raise CheckpointError(f"{entry.file.name}: {name} is F8_E4M3, but its scale {name}_scale_inv is missing")


def _find_mxfp4(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[Found]:
    return (in_blocks(name.removesuffix("_blocks"), stored) for name in stored if name.endswith("_blocks"))


def _find_compressed(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[Found]:
    groups, blocks = settings.get("config_groups"), list[Block | None]()
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
    _check_scales(stored)
    declared = tuple(block for block in blocks if block) if all(blocks) else ()
    for scale in stored:
        if scale.endswith(".weight_scale"):
            name = scale.removesuffix("_scale")
            packed = stored.get(f"{name}_packed")
            if packed is not None and packed.dtype == "U8":
                yield in_fp4(name, (packed.name, scale, f"{name}_global_scale"), stored=stored, divides=True)
            else:
                yield (in_bytes if packed is None else in_words)(name, scale, stored=stored, blocks=declared)


def _find_modelopt(settings: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> Iterator[Found]:
    settings = settings["quantization"] if isinstance(settings.get("quantization"), Mapping) else settings
    algorithm, size = settings.get("quant_algo"), settings.get("group_size")
    if str(algorithm).upper() not in MODELOPT_ALGORITHMS:
        raise CheckpointError(
            f"config.json: quant_algo = {reprlib.repr(algorithm)} is not supported (only "
            f"{', '.join(MODELOPT_ALGORITHMS)})"
        )
    if size not in (None, 16) and str(algorithm).upper().endswith("NVFP4"):
        raise CheckpointError(f"config.json: group_size = {reprlib.repr(size)} is not supported for NVFP4 (only 16)")
    _check_scales(stored)
    for scale, entry in stored.items():
        if scale.endswith("pre_quant_scale"):
            raise CheckpointError(f"{entry.file.name}: {scale}: scales of channels are not supported")
        if scale.endswith("weight_scale"):
            # The scales of all experts stand beside their tensor, which has no ".weight".
            name = scale.removesuffix("_scale" if scale.endswith(".weight_scale") else "_weight_scale")
            if name in stored and stored[name].dtype == "U8":
                yield in_fp4(name, (name, scale, f"{scale}_2"), stored=stored, divides=False)
            else:
                yield in_bytes(name, scale, stored=stored, blocks=())


def _check_scales(stored: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError for values of 4 or 8 bits without a scale."""
    for name, entry in stored.items():
        if entry.dtype in ("U8", "F8_E4M3") and not name.endswith("_scale"):
            values = name.removesuffix("_packed")
            scale = f"{values}_scale" if values.endswith("weight") else f"{values}_weight_scale"
            if scale not in stored:
                raise CheckpointError(f"{entry.file.name}: {name} is {entry.dtype}, but its scale {scale} is missing")


def _declared_block(weights: Mapping[str, Any]) -> Block | None:
    """Return the block of a `strategy` of compressed-tensors; None if it is not declared."""
    strategy, size, sizes = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "block" and isinstance(sizes, list) and len(sizes) == 2 and all(type(one) is int for one in sizes):
        return (sizes[0], sizes[1]) if min(sizes) > 0 else None
    if strategy == "group" and type(size) is int and size > 0:
        return 1, size
    return {"channel": (1, 0), "tensor": (0, 0)}.get(str(strategy))


FINDERS = {
    "fp8": _find_block_fp8,
    "mxfp4": _find_mxfp4,
    "compressed-tensors": _find_compressed,
    "modelopt": _find_modelopt,
}
