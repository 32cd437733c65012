"""The fastest level of instructions that a processor has is taken, or a lower one on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe.execution.native_levels import LEVELS, NativeKernelsUnavailable, choose_level

EVERY_LEVEL = [(machine, level) for machine, levels in LEVELS.items() for level in levels]
NAME_OF_FLAGS = {"x86_64": "flags", "aarch64": "Features"}


def cpuinfo_of(directory: Path, machine: str, flags: tuple[str, ...]) -> Path:
    path = directory / "cpuinfo"
    path.write_text(f"model name\t: x\n{NAME_OF_FLAGS[machine]}\t: fp {' '.join(flags)}\n")
    return path


@pytest.mark.parametrize(("machine", "level"), EVERY_LEVEL, ids=lambda value: getattr(value, "name", value))
def test_a_processor_gets_the_level_whose_instructions_it_has(tmp_path, machine, level):
    cpuinfo = cpuinfo_of(tmp_path, machine, level.flags)
    assert choose_level(machine=machine, cpuinfo=cpuinfo) == level
    assert choose_level(level.name, machine=machine, cpuinfo=cpuinfo) == level


@pytest.mark.parametrize(("machine", "level"), EVERY_LEVEL, ids=lambda value: getattr(value, "name", value))
def test_one_missing_instruction_leaves_a_lower_level(tmp_path, machine, level):
    levels = LEVELS[machine]
    here = {flag for each in levels[levels.index(level) :] for flag in each.flags}
    for missing in level.flags:
        cpuinfo = cpuinfo_of(tmp_path, machine, tuple(here - {missing}))
        with pytest.raises(NativeKernelsUnavailable, match=f"does not have {missing}"):
            choose_level(level.name, machine=machine, cpuinfo=cpuinfo)
        lower = [each for each in levels[levels.index(level) + 1 :] if missing not in each.flags]
        if lower:
            assert choose_level(machine=machine, cpuinfo=cpuinfo) == lower[0]
        else:
            with pytest.raises(NativeKernelsUnavailable, match="does not have"):
                choose_level(machine=machine, cpuinfo=cpuinfo)


def test_a_lower_level_is_taken_on_request(tmp_path):
    best = LEVELS["x86_64"][0]
    cpuinfo = cpuinfo_of(tmp_path, "x86_64", (*best.flags, "avx2"))
    assert choose_level("avx2", machine="x86_64", cpuinfo=cpuinfo).name == "avx2"


def test_unknown_names_and_machines_are_refused(tmp_path):
    with pytest.raises(NativeKernelsUnavailable, match="no level neon: choose from amx, avx512_bf16, avx512, avx2"):
        choose_level("neon", machine="x86_64")
    with pytest.raises(NativeKernelsUnavailable, match="riscv64 processors"):
        choose_level(machine="riscv64")
    with pytest.raises(NativeKernelsUnavailable, match="does not have avx2, fma, f16c"):
        choose_level(machine="x86_64", cpuinfo=tmp_path / "none")
