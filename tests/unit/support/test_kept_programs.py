"""Programs that tests keep: a folder per processor, pruned from its oldest end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.session.kept_programs import program_folder, prune


def test_a_folder_that_cannot_be_made_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert program_folder(tmp_path / "own") == tmp_path / "own"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = program_folder(tmp_path / "own")
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "rayserve_moe") and program_folder(tmp_path) == folder


def test_the_oldest_programs_go_first_and_new_ones_stay(tmp_path: Path):
    now = time.time()
    for name, age in (("old", 300_000), ("older", 400_000), ("new", 0)):
        path = tmp_path / name
        path.write_bytes(bytes(100))
        os.utime(path, (now - age, now - age))
    assert prune(tmp_path, max_bytes=300) == 0
    assert prune(tmp_path, max_bytes=200) == 1 and not (tmp_path / "older").exists()
    assert prune(tmp_path, max_bytes=0) == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["new"]
