"""Checkpoints that change, or lead elsewhere, while they are read: an error, and never a signal or torn weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.checkpoints import casting
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.header import DTYPES
from rayserve_moe.config import given_files
from rayserve_moe.config.given_files import Reach
from tests.support.checkpoints.broken_checkpoints import write_header

SINGLE, NORM = "model.safetensors", "model.norm.weight"
NUM_BYTES = 128 << 20
WITHIN_S = 60

READER = f"""
import os, sys, threading
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint

directory, size = sys.argv[1], int(sys.argv[2])
files, is_over = open_checkpoint(directory), threading.Event()

def rewrite():
    while not is_over.is_set():
        for length in (size // 2, size):
            os.truncate(os.path.join(directory, "{SINGLE}"), length)

writer = threading.Thread(target=rewrite)
writer.start()
refused = 0
for _ in range(12):
    try:
        files.read("big")
    except CheckpointError:
        refused += 1
is_over.set()
writer.join()
print(refused)
"""


@pytest.fixture
def big(tmp_path: Path, single: Path) -> Path:
    """A tensor of zeros that takes a while to read, in a sparse file."""
    shutil.copy(single / "config.json", tmp_path)
    header = {"big": {"dtype": "F32", "shape": [NUM_BYTES // 4096, 1024], "data_offsets": [0, NUM_BYTES]}}
    write_header(tmp_path / SINGLE, json.dumps(header).encode())
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size + NUM_BYTES)
    return tmp_path


def test_a_process_survives_a_file_that_is_rewritten_in_place_while_it_reads(big: Path):
    size = (big / SINGLE).stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", READER, str(big), str(size)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert int(done.stdout) > 0


def test_a_file_that_shrinks_in_the_middle_of_a_tensor_is_an_error(big: Path, monkeypatch: pytest.MonkeyPatch):
    """The part that was there is copied; then the file ends."""
    files, copy = open_checkpoint(big), os.preadv

    def copy_and_cut(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        copied = copy(descriptor, buffers, offset)
        os.truncate(big / SINGLE, offset + copied)
        return copied

    monkeypatch.setattr(os, "preadv", copy_and_cut)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: cannot read tensor big: truncated: it ends at byte"):
        files.read("big")


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_was_written_to_is_not_read_on(tmp_path: Path, single: Path, is_replaced: bool):
    """Neither in place nor under its name: header and tensors would be of two checkpoints."""
    path = shutil.copytree(single, tmp_path / "model")
    files = open_checkpoint(path)
    files.read(NORM)
    files.check_unchanged()
    if is_replaced:
        shutil.copy(path / SINGLE, path / "new")
        os.replace(path / "new", path / SINGLE)
    else:
        with (path / SINGLE).open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(bytes(4))
        os.utime(path / SINGLE, ns=(0, files.stamps[path / SINGLE].changed_ns + 1))
    for read in (lambda: files.read(NORM), files.check_unchanged):
        with pytest.raises(CheckpointError, match=f"{SINGLE}: .*the file has changed since it was opened"):
            read()


def test_a_reading_that_is_given_up_ends_within_a_tensor(big: Path, monkeypatch: pytest.MonkeyPatch):
    given_up, copy = threading.Event(), os.preadv
    files = open_checkpoint(big, Reach(given_up=given_up))

    def copy_and_give_up(*arguments) -> int:
        given_up.set()
        return copy(*arguments)

    monkeypatch.setattr(os, "preadv", copy_and_give_up)
    with pytest.raises(CheckpointError, match="reading was given up"):
        files.read("big")


def test_files_lie_below_the_roots_wherever_links_lead(tmp_path: Path, single: Path):
    """A directory outside is told nothing about; inside, every link is followed to its end."""
    root = tmp_path / "root"
    root.mkdir()
    inside, outside = shutil.copytree(single, root / "model"), shutil.copytree(single, tmp_path / "model")
    (tmp_path / "to root").symlink_to(root)
    (root / "to model").symlink_to(outside)
    reach = Reach((str(tmp_path / "nowhere"), str(tmp_path / "to root")))
    for place in (inside, tmp_path / "to root" / "model", root / ".." / "root" / "model"):
        assert open_checkpoint(place, reach).tensors
    for place in (outside, root / "to model", root / ".." / "model", tmp_path / "nothing", root / ".." / "rootless"):
        with pytest.raises(CheckpointError, match=r"lies outside of weight_roots$"):
            open_checkpoint(place, reach)
    for name in ("config.json", SINGLE):
        linked = shutil.copytree(single, root / f"linked {name}")
        (linked / name).unlink()
        (linked / name).symlink_to(outside / name)
        assert open_checkpoint(linked).tensors, "the Hub's cache consists of links"
        with pytest.raises(CheckpointError, match=f"{name}: a link leads out of weight_roots"):
            open_checkpoint(linked, reach)


def test_json_beyond_any_checkpoint_is_not_parsed(tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch):
    path = shutil.copytree(single, tmp_path / "model")
    (path / "config.json").write_bytes(b" " * 5000)
    monkeypatch.setattr(given_files, "MAX_JSON_BYTES", 4999)
    with pytest.raises(CheckpointError, match="5000 bytes of JSON are more than 4999"):
        open_checkpoint(path)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_value_that_is_not_finite_is_seen_and_no_other(dtype: np.dtype):
    """All 16-bit patterns, and as many of 32 bits, against numpy's answer."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    patterns = bits if dtype.itemsize == 2 else (bits.astype(np.uint32) << 16) | (bits.astype(np.uint32) & 1)
    values = patterns.view(dtype)
    expected = np.isfinite(values.astype(np.float32))
    assert [casting.is_finite(values[i : i + 1]) for i in range(0, len(values), 7)] == expected[::7].tolist()
    assert casting.is_finite(values[expected]) and casting.is_finite(values[:0]) and not casting.is_finite(values)
