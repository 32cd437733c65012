"""The library of native CPU kernels is found or built; if that fails, the reason is said and nothing is left behind."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.execution import native_library
from rayserve_moe.execution.native_levels import LEVELS, Level, NativeKernelsUnavailable
from rayserve_moe.execution.native_library import (
    build,
    find_or_build,
    library_name,
    loaded_level,
    register_native_kernels,
)
from tests.support.kernels.native_kernels import need_native_kernels

LEVEL = LEVELS["x86_64"][-1]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch):
    """A process that has loaded no library."""
    monkeypatch.setattr(native_library, "_loaded", [])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A private directory of libraries."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    return directory


def fake_compiler(directory: Path, script: str, name: str = "c++") -> None:
    compiler = directory / name
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def test_without_a_compiler_the_reason_names_those_that_were_looked_for(monkeypatch, tmp_path, cache):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeKernelsUnavailable, match=r"no C\+\+ compiler was found \(clang\+\+, c\+\+, g\+\+\)"):
        build(LEVEL, cache)


def test_what_was_built_needs_no_compiler(monkeypatch, tmp_path):
    need_native_kernels()
    level = register_native_kernels()
    built = find_or_build(level, default_cache_directory() / "native")
    (tmp_path / "native").mkdir(mode=0o700)
    shutil.copy(built, tmp_path / "native")
    monkeypatch.setenv("PATH", "")
    assert find_or_build(level, tmp_path / "native") == tmp_path / "native" / built.name


def test_what_the_package_brings_along_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "SHIPPED", tmp_path)
    monkeypatch.setenv("PATH", "")
    (tmp_path / library_name(LEVEL)).write_bytes(b"")
    assert find_or_build(LEVEL, cache).parent == tmp_path


def test_a_library_is_named_by_its_sources_and_options(monkeypatch, tmp_path):
    names = {library_name(level) for levels in LEVELS.values() for level in levels}
    assert len(names) == sum(map(len, LEVELS.values()))
    (tmp_path / "other.h").write_text("// other")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    assert library_name(LEVEL) not in names


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path, cache):
    fake_compiler(tmp_path, "echo 'unknown option -mavx2' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeKernelsUnavailable, match="fails: unknown option -mavx2"):
        build(LEVEL, cache)
    assert list(cache.iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(monkeypatch, tmp_path, cache):
    fake_compiler(tmp_path, "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native_library, "BUILD_TIMEOUT_S", 0.2)
    with pytest.raises(NativeKernelsUnavailable, match="takes longer"):
        build(LEVEL, cache)


def test_a_compiler_that_fails_leaves_the_work_to_the_next(monkeypatch, tmp_path, cache, caplog):
    fake_compiler(tmp_path, "printf '\\377 no header' >&2; exit 1", "clang++")
    fake_compiler(tmp_path, 'for last; do :; done; echo built > "$last"', "g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(LEVEL, cache).read_text() == "built\n"
    assert "no header; trying the next compiler" in caplog.text


def test_a_directory_that_cannot_be_written_is_no_disaster(tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(NativeKernelsUnavailable, match="cannot be kept"):
        find_or_build(LEVEL, tmp_path / "file")


@pytest.mark.parametrize("loose", ["directory", "file"])
def test_what_others_could_have_written_is_not_loaded(cache, loose):
    library = cache / library_name(LEVEL)
    library.write_bytes(b"")
    library.chmod(0o666 if loose == "file" else 0o600)
    cache.chmod(0o777 if loose == "directory" else 0o700)
    with pytest.raises(NativeKernelsUnavailable, match="writable for no other user"):
        find_or_build(LEVEL, cache)


@pytest.mark.usefixtures("unloaded")
def test_a_damaged_library_is_built_anew(monkeypatch, tmp_path, cache):
    need = library_name(LEVEL)
    (cache / need).write_bytes(b"")
    (cache / need).chmod(0o600)
    built: list[Level] = []

    def build_again(level: Level, directory: Path) -> Path:
        built.append(level)
        return directory / need

    monkeypatch.setattr(native_library, "choose_level", lambda requested: LEVEL)
    monkeypatch.setattr(native_library, "default_cache_directory", lambda: tmp_path / "home")
    monkeypatch.setattr(native_library, "find_or_build", lambda level, directory: directory / need)
    monkeypatch.setattr(native_library, "build", build_again)
    with pytest.raises(NativeKernelsUnavailable, match="cannot be loaded"):
        register_native_kernels()
    assert built == [LEVEL] and loaded_level() == ""


@pytest.mark.usefixtures("unloaded")
def test_a_library_that_is_none_is_no_disaster(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.setattr(native_library, "choose_level", lambda requested: LEVEL)
    monkeypatch.setattr(native_library, "find_or_build", lambda level, directory: tmp_path / "broken.so")
    with pytest.raises(NativeKernelsUnavailable, match="cannot be loaded"):
        register_native_kernels()
    assert loaded_level() == ""


def test_a_process_computes_at_one_level(monkeypatch):
    first, other = LEVELS["x86_64"][0], LEVELS["x86_64"][1]
    monkeypatch.setattr(native_library, "_loaded", [first])
    monkeypatch.setattr(
        native_library, "choose_level", lambda requested: {first.name: first, other.name: other}[requested]
    )
    monkeypatch.delenv("RAYSERVE_MOE_CPU_LEVEL", raising=False)
    assert register_native_kernels() == register_native_kernels(first.name) == first
    with pytest.raises(NativeKernelsUnavailable, match=f"already uses level {first.name}"):
        register_native_kernels(other.name)


@pytest.mark.usefixtures("unloaded")
def test_the_environment_names_the_level_where_nothing_else_does(monkeypatch):
    requested: list[str] = []

    def choose(name: str) -> Level:
        requested.append(name)
        raise NativeKernelsUnavailable("not here")

    monkeypatch.setattr(native_library, "choose_level", choose)
    monkeypatch.setenv("RAYSERVE_MOE_CPU_LEVEL", "avx2")
    for given in ("auto", "avx512"):
        with pytest.raises(NativeKernelsUnavailable):
            register_native_kernels(given)
    assert requested == ["avx2", "avx512"]
