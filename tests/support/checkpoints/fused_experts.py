"""Checkpoints whose experts lie in one tensor per layer, made from one that has a tensor per expert."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CONFIG_FILE, SINGLE_FILE
from rayserve_moe.model.families import qwen3_moe
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES

FUSED_RULES = {
    **CHECKPOINT_RULES,
    "expert_gate": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "expert_up": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "expert_down": "model.layers.{layer}.mlp.experts.down_proj",
}

LAYOUTS = ("fused_out_in", "fused_in_out_interleaved")

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def fused_family(layout: str) -> Any:
    """A family like Qwen3-MoE but for where its experts lie; its architecture is `layout`."""
    family: Any = ModuleType(layout)
    family.ARCHITECTURE, family.CHECKPOINT_RULES = layout, FUSED_RULES

    def spec_from_hf(config: dict[str, Any]) -> Any:
        spec = qwen3_moe.spec_from_hf(config)
        return replace(spec, experts=replace(spec.experts, layout=layout))

    family.spec_from_hf = spec_from_hf
    return family


def fused(path: Path, directory: Path, layout: str) -> Path:
    """Copy a Qwen3-MoE checkpoint in one file to `directory`, as one of the family of `layout`."""
    copy = shutil.copytree(path, directory)
    config = json.loads((copy / CONFIG_FILE).read_text(encoding="utf-8"))
    (copy / CONFIG_FILE).write_text(json.dumps(config | {"architectures": [layout]}), encoding="utf-8")
    save_file(fused_tensors(load_file(copy / SINGLE_FILE), layout), copy / SINGLE_FILE)
    return copy


def fused_tensors(plain: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, with the experts of each layer in one for gate and up, and one for down."""
    parts: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    tensors = {}
    for name in sorted(plain, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if found := _EXPERT.fullmatch(name):
            parts[found[1], found[3]].append(plain[name])
        else:
            tensors[name] = plain[name]
    for prefix in {prefix for prefix, _ in parts}:
        gate_EFD, up_EFD, down_EDF = (np.stack(parts[prefix, part]) for part in ("gate", "up", "down"))
        if layout == "fused_in_out_interleaved":
            both = np.stack([gate_EFD, up_EFD], axis=2).reshape(len(gate_EFD), -1, gate_EFD.shape[2])
            both, down_EDF = both.transpose(0, 2, 1), down_EDF.transpose(0, 2, 1)
        else:
            both = np.concatenate([gate_EFD, up_EFD], axis=1)
        tensors[f"{prefix}gate_up_proj"] = np.ascontiguousarray(both)
        tensors[f"{prefix}down_proj"] = np.ascontiguousarray(down_EDF)
    return tensors
