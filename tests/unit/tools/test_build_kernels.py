"""Native kernels are built ahead of the first start, for this machine or for a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe.execution.native_levels import NativeKernelsUnavailable
from rayserve_moe.tools import build_kernels

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Builds that only leave a file."""

    def build(level, directory, *, options=()):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{level.name}{'-portable' if options else ''}.so"
        path.touch()
        return path

    monkeypatch.setattr(build_kernels, "build", build)
    monkeypatch.setattr(build_kernels, "find_or_build", build)
    monkeypatch.setattr(build_kernels.platform, "machine", lambda: "x86_64")


def test_a_wheel_gets_every_level_of_its_machine(tmp_path: Path, capsys):
    assert build_kernels.main(["--all", "--into", str(tmp_path)]) == 0
    names = {"amx", "avx512_bf16", "avx512", "avx2"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}-portable.so" for name in names}
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_a_machine_builds_its_own_level(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(build_kernels, "choose_level", lambda requested: build_kernels.LEVELS["x86_64"][-1])
    assert build_kernels.main(["--into", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["avx2.so"]
    assert str(tmp_path / "avx2.so") in capsys.readouterr().out


def test_what_cannot_be_built_is_said(monkeypatch, capsys):
    def refuse(requested: str) -> None:
        raise NativeKernelsUnavailable("there is no C++ compiler")

    monkeypatch.setattr(build_kernels, "choose_level", refuse)
    assert build_kernels.main([]) == 1
    assert "there is no C++ compiler; XLA computes without them" in capsys.readouterr().err
