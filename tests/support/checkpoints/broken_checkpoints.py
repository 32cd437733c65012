"""Checkpoints that a server must not take in the place of a good one, each made from it and spoilt in one way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import safe_open
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


def _edit_header(change: Callable[[dict[str, dict]], object], *, more: bytes = b"") -> Callable[[Path], None]:
    """Have `change` edit the parsed header; the tensors' bytes stay, with `more` behind them."""

    def apply(directory: Path) -> None:
        raw = (directory / FILE).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:end])
        text = json.dumps(change(header) or header).encode()
        write_header(directory / FILE, text, raw[end:] + more)

    return apply


def write_header(file: Path, text: bytes, tensors: bytes = b"") -> None:
    """Write a safetensors file whose header is `text`."""
    file.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def _header_text(text: str) -> Callable[[Path], None]:
    return lambda directory: write_header(directory / FILE, text.encode())


def _set(name: str, **fields: object) -> Callable[[dict[str, dict]], object]:
    return lambda header: header[name].update(fields)


def _shift(name: str, num_bytes: int) -> Callable[[dict[str, dict]], object]:
    return lambda header: header[name].update(
        data_offsets=[offset + num_bytes for offset in header[name]["data_offsets"]]
    )


def _overlap(header: dict[str, dict]) -> None:
    """Two tensors of one size share their bytes; nobody holds those of the second."""
    first, second = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _configure_text(old: str, new: str) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        text = (directory / "config.json").read_text()
        assert old in text
        (directory / "config.json").write_text(text.replace(old, new))

    return apply


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return apply


def _poison(value: float) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors[GATE].__setitem__((0, 5), value)


def _as_set(directory: Path, place: str) -> None:
    """Make the weights an indexed set whose only file lies at `place`, seen from the directory; it is there."""
    with safe_open(directory / FILE, "numpy") as tensors:
        names = list(tensors.keys())
    target = Path(os.path.normpath(directory / place))
    target.parent.mkdir(exist_ok=True)
    (directory / FILE).rename(target)
    (directory / f"{FILE}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))


NESTED = "[" * 100_000 + "]" * 100_000
NOT_BESIDE = "is not a file name beside the index"


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
    "malformed config": (_configure(rms_norm_eps="much"), "rms_norm_eps must be a positive number"),
    "config nested": (_configure_text('"silu"', NESTED), "config.json: not readable as JSON: nested too deeply"),
    "config beyond numbers": (
        _configure_text('"attention_dropout": 0.0', '"attention_dropout": 1e400'),
        "config.json: not readable as JSON: a number in it is",
    ),
    "positions beyond numbers": (_configure(max_position_embeddings=10**300), "max_position_embeddings must be a"),
    "positions not whole": (_configure(max_position_embeddings=4096.0), "max_position_embeddings must be a"),
    "more layers than any model": (_configure(num_hidden_layers=10**30), "num_hidden_layers must be a positive"),
    "more experts than any model": (_configure(num_experts=1 << 40), "num_experts must be a positive"),
    "key twice in config": (_configure_text('"hidden_act"', '"head_dim": 32, "hidden_act"'), "the same key twice"),
    "layers of another kind": (_configure(mlp_only_layers={"1": [2]}), "mlp_only_layers must be a list"),
    "architecture of another kind": (_configure(architectures=[{"a": 1}]), "architectures"),
    "header nested": (_header_text('{"a": ' + NESTED + "}"), "nested too deeply"),
    "shape infinite": (
        _header_text('{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'),
        "Infinity is no JSON number",
    ),
    "shape not whole": (_edit_header(_set(GATE, shape=[16.0, 128])), "malformed header"),
    "shape of many dimensions": (_edit_header(_set(GATE, shape=[1] * 10**5)), "malformed header"),
    "shape beyond memory": (_edit_header(_set(GATE, shape=[10**30, 10**30])), "cannot take"),
    "offsets beyond the file": (_edit_header(_shift(GATE, 10**18)), "leaves a gap before it"),
    "offsets below nothing": (_edit_header(_shift(GATE, -(10**18))), "negative"),
    "offsets of three": (_edit_header(_set(GATE, data_offsets=[0, 8192, 0])), "malformed header"),
    "tensors overlap": (_edit_header(_overlap), "overlaps the tensor before it"),
    "bytes behind the tensors": (_edit_header(lambda _: None, more=b"more"), "4 bytes follow the last tensor"),
    "length beyond the file": (lambda path: (path / FILE).write_bytes(b"\xff" * 64), "truncated"),
    "name of many lines": (_edit_header(lambda header: header | {"a\nb": header[GATE]}), "no usable name"),
    "not a number": (_change_tensors(_poison(np.nan)), f"tensor {GATE} holds values that are not finite"),
    "infinite": (_change_tensors(_poison(-np.inf)), f"tensor {GATE} holds values that are not finite"),
    "pipe for config": (_replace("config.json", os.mkfifo), "config.json: not a regular file"),
    "pipe for weights": (_replace(FILE, os.mkfifo), f"{FILE}: not a regular file"),
    "device for weights": (_replace(FILE, lambda file: file.symlink_to("/dev/zero")), f"{FILE}: not a regular file"),
    "directory for weights": (_replace(FILE, Path.mkdir), f"{FILE}: not a regular file"),
    "link to itself": (_replace(FILE, lambda file: file.symlink_to(file.name)), f"{FILE}: not readable"),
    "shard in the parent": (lambda path: _as_set(path, "../outside.safetensors"), NOT_BESIDE),
    "shard in a folder": (lambda path: _as_set(path, "inside/model.safetensors"), NOT_BESIDE),
    "shard by its whole path": (lambda path: _as_set(path, str(path / "whole.safetensors")), NOT_BESIDE),
    "config missing": (_lose("config.json"), "config.json: file is missing"),
    "weights missing": (_lose(FILE), "has neither"),
    "empty": (_empty, "config.json: file is missing"),
    "gone": (shutil.rmtree, "no such checkpoint directory"),
}
"""How to break a directory, and what a refusal of it says."""
