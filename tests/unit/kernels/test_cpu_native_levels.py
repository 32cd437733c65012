"""Every level of the native CPU kernels computes what naive loops compute (`native/driver.cc`), here or emulated."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from rayserve_moe.execution.native_levels import LEVELS, Level, NativeKernelsUnavailable, choose_level
from rayserve_moe.execution.native_library import build, find_compilers
from tests.support.kernels.native_kernels import build_program

DRIVER = Path(__file__).with_name("native") / "driver.cc"
TIMEOUT_S = 1800.0
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE = LEVELS.get(platform.machine(), ())


def run_driver(command: list[str]) -> None:
    """Run every `stride`th case on two cores, by two callers."""
    found = subprocess.run([*command, "7", "2", "2"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    assert ", 0 wrong" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_a_level_of_this_machine_is_right(tmp_path: Path, level: Level) -> None:
    program = build_program(DRIVER, "-O2", directory=tmp_path, level=level)
    try:
        choose_level(level.name)
    except NativeKernelsUnavailable as error:
        pytest.skip(f"compiled, and not run: {error}")
    run_driver([str(program)])


@pytest.mark.slow
@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_the_library_of_a_level_is_built(tmp_path: Path, level: Level) -> None:
    if not find_compilers():
        pytest.skip("there is no C++ compiler")
    assert build(level, tmp_path).stat().st_size > 100_000


@pytest.mark.emulated
@pytest.mark.parametrize("level", LEVELS["aarch64"], ids=lambda level: level.name)
def test_arm_is_right_under_emulation(tmp_path: Path, level: Level) -> None:
    compiler, emulator = shutil.which(CROSS_COMPILER), shutil.which(EMULATOR)
    if compiler is None or emulator is None:
        pytest.skip(f"{CROSS_COMPILER} or {EMULATOR} is not installed: make emulation")
    build(level, tmp_path, compiler=compiler)
    program = build_program(DRIVER, "-O2", "-static", directory=tmp_path, level=level, compiler=compiler)
    run_driver([emulator, "-cpu", "max", str(program)])
