"""Checkpoints that a server must not take in the place of a good one, each made from it and spoilt in one way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "model.safetensors"
GATE = "model.layers.2.mlp.gate.weight"


def broken_copy(good: Path, way: str, target: Path) -> Path:
    """Copy a checkpoint and break the copy; `way` is one of WAYS."""
    shutil.copytree(good, target)
    WAYS[way][0](target)
    return target


def _truncate(directory: Path) -> None:
    content = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(content[: len(content) // 2])


def _cut_header(directory: Path) -> None:
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:100])


def _change_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / FILE)
        change(tensors)
        save_file(tensors, directory / FILE)

    return apply


def _reshape(tensors: dict[str, np.ndarray]) -> None:
    tensors[GATE] = np.ascontiguousarray(tensors[GATE][:, :-1])


def _retype(tensors: dict[str, np.ndarray]) -> None:
    tensors[GATE] = tensors[GATE].astype(np.int32)


def _configure(**changes: object) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))

    return apply


def _lose(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


WAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "truncated"),
    "header cut": (_cut_header, "truncated"),
    "tensor missing": (_change_tensors(lambda tensors: tensors.pop(GATE)), f"missing: {GATE}"),
    "tensor too many": (_change_tensors(lambda tensors: tensors.update(more=tensors[GATE])), "unexpected: more"),
    "wrong shape": (_change_tensors(_reshape), "misshapen"),
    "wrong dtype": (_change_tensors(_retype), "dtype"),
    "other model": (_configure(num_experts_per_tok=1, rope_theta=5.0), "another model: rope, router differ"),
    "other architecture": (_configure(architectures=["OtherForCausalLM"]), "architectures"),
    "malformed config": (_configure(rms_norm_eps="much"), "wrong type"),
    "config missing": (_lose("config.json"), "config.json: file is missing"),
    "weights missing": (_lose(FILE), "holds neither"),
    "empty": (_empty, "config.json: file is missing"),
    "gone": (shutil.rmtree, "no such checkpoint directory"),
}
"""How to break a directory, and what a refusal of it says."""
