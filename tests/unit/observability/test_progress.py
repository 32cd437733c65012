"""The console of a start reads each report of its processes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from rayserve_moe.observability import progress
from rayserve_moe.observability.progress import (
    PROGRESS_VARIABLE,
    ConsoleWarnings,
    Counter,
    Progress,
    ProgressReader,
    Warned,
    report,
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress"
    path.touch()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    return path


def test_reports_are_read_once_and_in_their_order(file: Path) -> None:
    reader = ProgressReader(file)
    report("compiling", 1, total=3, detail="0 found on disk")
    report("compiling", 2, total=3)
    assert list(reader.read()) == [Progress("compiling", 1, 3, "0 found on disk"), Progress("compiling", 2, 3)]
    assert list(reader.read()) == []
    report("loading")
    assert list(reader.read()) == [Progress("loading")]


def test_a_line_that_is_not_whole_waits_and_one_of_something_else_is_skipped(file: Path) -> None:
    reader = ProgressReader(file)
    file.write_bytes(b'nothing\n{"stage": "a", "done": 1}\n{"stage": "b"')
    assert list(reader.read()) == [Progress("a", 1)]
    with file.open("ab") as more:
        more.write(b"}\n")
    assert list(reader.read()) == [Progress("b")]


def test_without_a_start_command_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    report("compiling", 1, total=2)
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "gone"))
    report("compiling", 1, total=2)
    assert not (tmp_path / "gone").exists()
    assert list(ProgressReader(tmp_path / "gone").read()) == []


def test_warnings_are_sent_and_other_lines_are_not(file: Path) -> None:
    log, handler = logging.getLogger("tests without the package's handlers"), ConsoleWarnings()
    log.addHandler(handler)
    try:
        log.info("loaded")
        log.warning("pages of %d", 16)
    finally:
        log.removeHandler(handler)
    assert list(ProgressReader(file).read()) == [Warned("WARNING", "pages of 16")]


def test_a_long_file_is_emptied_and_nothing_after_is_lost(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_BYTES", 100)
    reader = ProgressReader(file)
    for number in range(10):
        report("stage", number, total=10)
    assert len(list(reader.read())) == 10 and file.stat().st_size == 0
    report("stage", 10, total=10)
    assert list(reader.read()) == [Progress("stage", 10, 10)]


def test_a_counter_reports_steps_and_its_end_from_any_thread(file: Path) -> None:
    counter = Counter("reading weights", 1000, step=300)
    threads = [threading.Thread(target=counter.add, args=(100,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [each.done for each in ProgressReader(file).read() if isinstance(each, Progress)]
    assert found[-1] == 1000 and len(found) == 4
