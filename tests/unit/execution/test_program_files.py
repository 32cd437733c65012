"""Programs on disk: what is read is what was written, whole, by this user, and never more than the bound is kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rayserve_moe.execution.programs.files import CHECKS, ProgramFiles

PAYLOADS = {f"{i:064x}": bytes([i]) * 5000 for i in range(6)}
KEY, OTHER = list(PAYLOADS)[:2]


def files_in(path: Path, *, max_bytes: int = 1 << 30) -> ProgramFiles:
    return ProgramFiles(path / "programs", max_bytes=max_bytes)


def test_what_is_written_is_read_by_every_later_start_and_by_nobody_else(tmp_path: Path) -> None:
    assert files_in(tmp_path).read(KEY) is None
    files_in(tmp_path).write(KEY, PAYLOADS[KEY])
    assert files_in(tmp_path).read(KEY) == PAYLOADS[KEY]
    assert files_in(tmp_path).read(OTHER) is None
    (file,) = (tmp_path / "programs").iterdir()
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


DAMAGES = {
    "cut short": lambda stored: stored[:1000],
    "empty": lambda stored: b"",
    "one bit": lambda stored: stored[:-1] + bytes([stored[-1] ^ 1]),
    "longer": lambda stored: stored + b"x",
    "of jax's own cache": lambda stored: b"\x28\xb5\x2f\xfd" + b"z" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_written_anew(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    files.write(KEY, PAYLOADS[KEY])
    path = tmp_path / "programs" / KEY
    path.write_bytes(damage(path.read_bytes()))
    assert files.read(KEY) is None
    assert "damaged" in caplog.text and KEY in caplog.text
    files.write(KEY, PAYLOADS[KEY])
    assert files.read(KEY) == PAYLOADS[KEY]


def test_a_file_under_another_name_is_not_that_program(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(KEY, PAYLOADS[KEY])
    os.rename(tmp_path / "programs" / KEY, tmp_path / "programs" / OTHER)
    assert files.read(OTHER) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777], ids=oct)
def test_a_directory_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    files_in(tmp_path)
    (tmp_path / "programs").chmod(mode)
    with pytest.raises(PermissionError, match=r"programs must belong to user .* writable for no other user"):
        files_in(tmp_path)


def test_a_directory_or_a_file_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_in(tmp_path)
    files.write(KEY, PAYLOADS[KEY])
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert files.read(KEY) is None and "must belong to user" in caplog.text
    with pytest.raises(PermissionError, match="must belong to user"):
        files_in(tmp_path)


def test_links_pipes_and_files_that_others_can_write_to_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_in(tmp_path)
    files.write(KEY, PAYLOADS[KEY])
    path = tmp_path / "programs" / KEY
    (tmp_path / "programs" / OTHER).symlink_to(path)
    assert files.read(OTHER) is None
    path.chmod(0o660)
    assert files.read(KEY) is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert files.read(KEY) is None
    assert caplog.text.count("is not used") == 3
    (tmp_path / "linked").symlink_to(tmp_path / "programs")
    with pytest.raises(PermissionError):
        ProgramFiles(tmp_path / "linked", max_bytes=1)


def test_what_was_not_used_for_the_longest_time_is_dropped(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_bytes=4 * 5100)
    left_behind = tmp_path / "programs" / "left-by-an-interrupted-process"
    left_behind.write_bytes(b"x" * 5000)
    os.utime(left_behind, (0, 0))
    for age, key in enumerate(list(PAYLOADS)[:3]):
        files.write(key, PAYLOADS[key])
        os.utime(tmp_path / "programs" / key, (age + 1, age + 1))
    assert files.read(KEY) == PAYLOADS[KEY]
    for key in list(PAYLOADS)[3:5]:
        files.write(key, PAYLOADS[key])
    kept = {path.name for path in (tmp_path / "programs").iterdir()}
    assert kept == {KEY, *list(PAYLOADS)[2:5]}, "the first was used in between"


def test_a_directory_is_checked_by_the_first_write_and_then_by_every_part_of_the_bound(tmp_path: Path) -> None:
    files, old = files_in(tmp_path, max_bytes=CHECKS * 12_000), tmp_path / "programs" / "old"
    is_kept = []
    for _ in range(4):
        with old.open("wb") as file:
            file.truncate(CHECKS * 12_000)  # takes no room on the disk
        os.utime(old, (0, 0))
        files.write(KEY, PAYLOADS[KEY])
        is_kept.append(old.exists())
    assert is_kept == [False, True, True, False], "5,000 bytes each"


def test_a_disk_that_takes_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    (tmp_path / "programs").rmdir()
    files.write(KEY, PAYLOADS[KEY])
    assert "a compiled program is not kept" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        files_in(tmp_path / "file")


def test_many_writers_and_readers_leave_whole_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With room for three of six, so that files also go while others read them."""
    done, wrong = threading.Event(), []

    def write(key: str) -> None:
        files = files_in(tmp_path, max_bytes=3 * 5100)
        for _ in range(20):
            files.write(key, PAYLOADS[key])

    def read() -> None:
        files = files_in(tmp_path)
        while not done.is_set():
            wrong.extend(key for key in PAYLOADS if files.read(key) not in (None, PAYLOADS[key]))

    reader, writers = threading.Thread(target=read), [threading.Thread(target=write, args=[key]) for key in PAYLOADS]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not wrong and "damaged" not in caplog.text
    assert sum(path.stat().st_size for path in (tmp_path / "programs").iterdir()) <= 3 * 5100
