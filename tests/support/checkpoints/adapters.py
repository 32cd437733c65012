"""LoRA adapters over any checkpoint, in every layout of trainers, and the checkpoint that each merges into."""

# E experts   r rank   D model width   F expert width

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.model.adapters import adapted_matrices
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files

LAYOUTS = ("fused", "per_expert", "per_parameter", "shared_outer", "sglang")
RANK, ALPHA = 4, 8.0
PREFIX = "base_model.model."


@dataclass(frozen=True)
class MadeAdapter:
    """An adapter's files, and the tensors of the checkpoint that it changes, merged in float64."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    merged: dict[str, np.ndarray]

    def write(self, directory: Path, dtype: Any = np.float32) -> Path:
        """Write the directory that a trainer sends."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(
            {name: np.ascontiguousarray(value.astype(dtype)) for name, value in self.tensors.items()},
            directory / "adapter_model.safetensors",
        )
        return directory

    def write_merged(self, checkpoint: Path, directory: Path) -> Path:
        """Write a copy of the checkpoint with the merged tensors, in the dtype of its own."""
        shutil.copytree(checkpoint, directory)
        file = directory / "model.safetensors"
        tensors = load_file(file)
        save_file({name: self.merged.get(name, value).astype(value.dtype) for name, value in tensors.items()}, file)
        return directory


class _Making:
    def __init__(self, checkpoint: Path, seed: int, rank: int = RANK) -> None:
        files, self.rank = open_checkpoint(checkpoint), rank
        self.spec, self.rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
        self.tree = parameters_in_files(parameter_specs(self.spec, dtype="float32"), self.rules, spec=self.spec)
        self.places = tensor_places(self.tree, self.rules)
        self.merged = {
            name: value.astype(np.float64) for name, value in load_file(checkpoint / "model.safetensors").items()
        }
        self.changed: set[str] = set()
        self.tensors: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(seed)

    def draw(self, *shape: int) -> np.ndarray:
        return self.random.normal(0, 0.06, shape).astype(np.float32)

    def add(self, module: str, a: np.ndarray, b: np.ndarray) -> None:
        self.tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}

    def merge(self, name: str, delta: np.ndarray, at: Any = ...) -> None:
        self.merged[name][at] += ALPHA / self.rank * delta
        self.changed.add(name)

    def matrices(self) -> None:
        """Adapt every matrix of the layers outside of experts: attention, routers, shared experts, dense layers."""
        for name, (place, *_) in self.places.items():
            shape = place.spec.file_shape
            if len(shape) == 2 and place.spec.layers and not place.spec.num_experts and not place.spec.file.is_row:
                a, b = self.draw(self.rank, shape[1]), self.draw(shape[0], self.rank)
                self.add(name.removesuffix(".weight"), a, b)
                self.merge(name, b.astype(np.float64) @ a)

    def beside_weights(self) -> None:
        """Adapt every matrix of attention, shared experts and dense layers."""
        taking = {(each.group, each.name) for each in adapted_matrices(self.tree, self.spec)}
        for name, places in self.places.items():
            if any((place.path[0], place.path[-1]) in taking for place in places):
                outputs, inputs = places[0].spec.file_shape
                a, b = self.draw(self.rank, inputs), self.draw(outputs, self.rank)
                self.add(name.removesuffix(".weight"), a, b)
                self.merge(name, b.astype(np.float64) @ a)

    def experts(self, layer: int, layout: str) -> None:
        """Adapt gate, up and down of all experts of a layer."""
        width, inner, num = self.spec.exchanged_width, self.spec.experts.intermediate_size, self.spec.router.num_experts
        is_fused = layout in ("fused", "per_parameter")
        shared = 1 if layout == "shared_outer" else num
        a_up, a_gate, a_down = (
            self.draw(shared, self.rank, width),
            self.draw(shared, self.rank, width),
            self.draw(num, self.rank, inner),
        )
        a_gate = a_up if is_fused or layout == "shared_outer" else a_gate
        b_gate, b_up = (self.draw(num, inner, self.rank) for _ in range(2))
        b_down = self.draw(shared, width, self.rank)
        for expert in range(num):
            for role, a, b in (("gate", a_gate, b_gate), ("up", a_up, b_up), ("down", a_down, b_down)):
                if f"expert_{role}" not in self.rules:
                    continue
                delta = b[expert % len(b)].astype(np.float64) @ a[expert % len(a)]
                self._merge_expert(layer, expert, role, delta)
        stem, _, rest = self._first_rule.format(layer=layer, expert=0).partition(f"layers.{layer}.")
        parent = rest.partition(".experts")[0] if ".experts" in rest else rest.rpartition(".gate_proj")[0]
        below = "" if rest.startswith("experts.") else f"{parent.removesuffix('.input_linear.weight')}."
        container = f"{stem}layers.{layer}.{below}experts"
        self._emit(container, layout, (a_gate, b_gate), (a_up, b_up), (a_down, b_down))

    def _emit(self, container: str, layout: str, gate: Any, up: Any, down: Any) -> None:
        both_b = np.zeros((len(gate[1]), 2 * gate[1].shape[1], self.rank), np.float32)
        at_gate, at_up = self._halves()
        both_b[:, at_gate], both_b[:, at_up] = gate[1], up[1]
        if layout == "fused":
            self.add(f"{container}.base_layer", _flat_a(gate[0]), _flat_b(both_b))
            self.add(container, _flat_a(down[0]), _flat_b(down[1]))
        elif layout == "per_parameter":
            self.add(f"{container}.gate_up_proj", gate[0], both_b)
            self.add(f"{container}.down_proj", *down)
        elif layout == "sglang":
            self.add(f"{container}.gate_up_proj", np.concatenate((gate[0], up[0]), axis=1), both_b)
            self.add(f"{container}.down_proj", *down)
        elif layout == "shared_outer":
            parts = [("w1", gate), ("w3", up), ("w2", down)]
            for part, pair in parts if "expert_gate" in self.rules else parts[1:]:
                self.add(f"{container}.{part}", *pair)
        else:
            pairs = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            for part, (a, b) in pairs.items() if "expert_gate" in self.rules else list(pairs.items())[1:]:
                for expert in range(len(a)):
                    self.add(f"{container}.{expert}.{part}", a[expert], b[expert])

    def _halves(self) -> tuple[slice, slice]:
        inner = self.spec.experts.intermediate_size
        if self.spec.experts.layout == "fused_in_out_interleaved":
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, inner), slice(inner, None)

    def _merge_expert(self, layer: int, expert: int, role: str, delta: np.ndarray) -> None:
        rule = self.rules[f"expert_{role}"]
        name = rule.format(layer=layer, expert=expert)
        if "{expert}" in rule:
            self.merge(name, delta)
        elif role == "down" or self.rules["expert_gate"] != self.rules["expert_up"]:
            self.merge(name, delta.T if self._is_in_out else delta, expert)
        else:
            half = self._halves()[role == "up"]
            self.merge(
                name,
                delta.T if self._is_in_out else delta,
                (expert, slice(None), half) if self._is_in_out else (expert, half),
            )

    @property
    def _first_rule(self) -> str:
        return self.rules.get("expert_gate", self.rules["expert_up"])

    @property
    def _is_in_out(self) -> bool:
        return self.spec.experts.layout == "fused_in_out_interleaved"


def make_adapter(checkpoint: Path, layout: str = "fused", *, seed: int = 1, others: bool = True) -> MadeAdapter:
    """Make an adapter of all experts and, with `others`, of every other matrix of the layers."""
    making = _Making(checkpoint, seed)
    for layer in making.spec.moe_layer_ids:
        making.experts(layer, layout)
    if others:
        making.matrices()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
    return MadeAdapter(config, making.tensors, {name: making.merged[name] for name in making.changed})


def make_adapter_beside(checkpoint: Path, *, seed: int, rank: int = RANK, experts: str = "") -> MadeAdapter:
    """Make an adapter of all adapted matrices, and of experts in a layout if one is given."""
    making = _Making(checkpoint, seed, rank)
    making.beside_weights()
    for layer in making.spec.moe_layer_ids if experts else ():
        making.experts(layer, experts)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
    return MadeAdapter(config, making.tensors, {name: making.merged[name] for name in making.changed})


def _flat_a(a: np.ndarray) -> np.ndarray:
    """Return A of PEFT: [E r, in], experts outermost."""
    return a.reshape(-1, a.shape[-1])


def _flat_b(b: np.ndarray) -> np.ndarray:
    """Return B of PEFT: [out, r E], ranks outermost."""
    return b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def flat(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return contiguous copies, as files hold them."""
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}
