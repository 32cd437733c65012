"""Checkpoint directories open lazily, and everything wrong with one is one sentence that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint, read_config
from rayserve_moe.checkpoints.header import read_header

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def test_every_tensor_reads_as_safetensors_reads_it(single):
    files, wanted = open_checkpoint(single), load_file(single / SINGLE)
    assert set(files.tensors) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(files.read(name), values)
        assert files.read(name).dtype == np.float32


def test_an_indexed_set_holds_what_the_single_file_holds(single, indexed):
    one, several = open_checkpoint(single), open_checkpoint(indexed)
    assert len({entry.file for entry in several.tensors.values()}) > 3
    assert set(one.tensors) == set(several.tensors)
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), several.read(name))


@pytest.mark.parametrize("index", [(slice(3, 9),), (slice(0, 260, 7), slice(4, 5)), (slice(0, 0),), ()])
def test_a_slice_is_the_slice_of_the_whole(single, index):
    files = open_checkpoint(single)
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(files.read(name, index), files.read(name)[index])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floating_types_are_read_bit_for_bit(tmp_path, single, dtype):
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(dtype)
    # An odd number of bytes in the header's text leaves the tensor at any offset, aligned or not.
    files = _with_tensors(
        tmp_path, single, {"odd_": np.ones(3, np.uint8), "x": values, "scalar": np.array(values[0, 0])}
    )
    assert files.read("x").dtype == dtype
    np.testing.assert_array_equal(files.read("x"), values)
    assert files.read("scalar") == values[0, 0]


def test_an_empty_tensor_reads_as_empty(tmp_path, single):
    files = _with_tensors(tmp_path, single, {"none": np.zeros((0, 4), np.float32)})
    assert files.read("none").shape == (0, 4)


def test_reading_a_slice_does_not_read_the_file(tmp_path, single):
    """A sparse file of half a terabyte: reading more of it than asked would not end within a test."""
    num_rows = 2**26
    header = {"big": {"dtype": "BF16", "shape": [num_rows, 4096], "data_offsets": [0, num_rows * 8192]}}
    text = json.dumps(header).encode()
    shutil.copy(single / "config.json", tmp_path)
    with (tmp_path / SINGLE).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.seek(8 + len(text) + (num_rows - 1) * 8192)
        stream.write(np.full(4096, 3, ml_dtypes.bfloat16).tobytes())
    files = open_checkpoint(tmp_path)
    assert files.read("big", (slice(num_rows - 2, num_rows), slice(0, 2))).tolist() == [[0, 0], [3, 3]]


def _with_tensors(directory: Path, like: Path, tensors: dict[str, np.ndarray]):
    shutil.copy(like / "config.json", directory)
    save_file(tensors, directory / SINGLE)
    return open_checkpoint(directory)


def _cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - num_bytes)


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def _drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _header(**fields: object) -> Callable[[Path], object]:
    """Replace the file by one whose only tensor is described by `fields`."""
    text = json.dumps({NORM: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | fields}).encode()
    return lambda path: (path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


DAMAGED_SINGLE = {
    "no directory": (shutil.rmtree, ["no such checkpoint directory"]),
    "no config": (_drop("config.json"), ["config.json", "missing"]),
    "config is not JSON": (_text("config.json", "{'a': 1}"), ["config.json", "JSON"]),
    "config is not text": (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"), ["config.json", "JSON"]),
    "config is a list": (_text("config.json", "[1]"), ["config.json", "list", "object"]),
    "no weights": (_drop(SINGLE), ["neither", SINGLE, INDEX]),
    "weights are empty": (_text(SINGLE, ""), [SINGLE]),
    "weights are not safetensors": (_text(SINGLE, "<html>not found</html>" * 9), [SINGLE, "truncated"]),
    "header is not JSON": (
        lambda path: (path / SINGLE).write_bytes(b"\x04" + bytes(7) + b"{{{{"),
        [SINGLE, "not a saf"],
    ),
    "header is a list": (lambda path: (path / SINGLE).write_bytes(b"\x02" + bytes(7) + b"[]"), [SINGLE, "not a saf"]),
    "cut in the last tensor": (_cut(SINGLE, 1), [SINGLE, "truncated", "tensor model.", "ends at byte"]),
    "cut in the header": (lambda path: os.truncate(path / SINGLE, 100), [SINGLE, "truncated", "header"]),
    "tensor past the end": (_header(shape=[2, 3], data_offsets=[0, 24]), [SINGLE, "truncated", NORM]),
    "size at odds with shape": (_header(shape=[2, 3]), [SINGLE, NORM, "[2, 3]", "16 bytes"]),
    "offsets reversed": (_header(data_offsets=[16, 0]), [SINGLE, NORM, "negative"]),
    "no offsets": (_header(data_offsets=None), [SINGLE, NORM, "malformed"]),
    "shape of words": (_header(shape=["two"]), [SINGLE, NORM, "malformed"]),
}


@pytest.mark.parametrize("what", DAMAGED_SINGLE)
def test_a_damaged_directory_is_one_clear_error(tmp_path, single, what):
    damage, words = DAMAGED_SINGLE[what]
    _expect_error(shutil.copytree(single, tmp_path / "model"), damage, words)


def _rewrite_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return damage


def _first_shard(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def _repeat_tensor(path: Path) -> None:
    first = _first_shard(path)
    name, values = next(iter(load_file(first).items()))
    second = sorted(path.glob("model-*.safetensors"))[1]
    save_file(load_file(second) | {name: values}, second)


DAMAGED_INDEXED = {
    "shard missing": (lambda path: _first_shard(path).unlink(), ["model-00001", "missing", INDEX]),
    "shard cut": (lambda path: os.truncate(_first_shard(path), _first_shard(path).stat().st_size - 4), ["truncated"]),
    "index is not JSON": (_text(INDEX, "{"), [INDEX, "JSON"]),
    "index without weight_map": (_text(INDEX, "{}"), [INDEX, "weight_map"]),
    "index maps to numbers": (_text(INDEX, '{"weight_map": {"a": 1}}'), [INDEX, "weight_map"]),
    "index leaves the directory": (_rewrite_index(lambda m: m.update({NORM: "../x.safetensors"})), [INDEX, "../x"]),
    "index lists what no file has": (_rewrite_index(lambda m: m.update(ghost=m[NORM])), ["tensor ghost", "missing"]),
    "index names the wrong file": (
        _rewrite_index(lambda m: m.update({NORM: m["model.layers.0.self_attn.q_proj.weight"]})),
        [f"tensor {NORM}", INDEX],
    ),
    "tensor in two files": (_repeat_tensor, ["model-00002", "tensor model.embed", "already in model-00001"]),
}


@pytest.mark.parametrize("what", DAMAGED_INDEXED)
def test_a_damaged_set_is_one_clear_error(tmp_path, indexed, what):
    damage, words = DAMAGED_INDEXED[what]
    _expect_error(shutil.copytree(indexed, tmp_path / "model"), damage, words)


def _expect_error(path: Path, damage: Callable[[Path], object], words: list[str]) -> None:
    open_checkpoint(path)
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    for word in words:
        assert word in message


def test_a_file_that_shrinks_after_opening_is_an_error_not_a_crash(tmp_path, single):
    path = shutil.copytree(single, tmp_path / "model")
    files = open_checkpoint(path)
    os.truncate(path / SINGLE, 5000)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: cannot read tensor {NORM}"):
        files.read(NORM)


def test_unknown_names_and_integer_tensors_are_named(tmp_path, single):
    files = _with_tensors(tmp_path, single, {"counts": np.arange(3)})
    with pytest.raises(CheckpointError, match="no tensor ghost"):
        files.read("ghost")
    with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor counts has dtype I64"):
        files.read("counts")


def test_config_is_read_without_weights(tmp_path, single):
    shutil.copy(single / "config.json", tmp_path)
    assert read_config(tmp_path) == open_checkpoint(single).config


class Bucket:
    """Bytes in memory, as a stream of weights would leave them."""

    def __init__(self, content: bytes) -> None:
        self.content, self.num_bytes = content, len(content)

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        return self.content[offset : offset + num_bytes]


def test_one_parser_reads_headers_of_files_and_of_bytes_in_memory(single):
    file = single / SINGLE
    content = file.read_bytes()
    assert read_header(file, Bucket(content)) == open_checkpoint(single).tensors
    for cut in (0, 7, 100, len(content) - 1):
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(file, Bucket(content[:cut]))
