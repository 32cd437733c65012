"""Instruction levels that the native CPU kernels are compiled for, and the choice of a level for a processor."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AUTO = "auto"
COMPILERS = ("clang++", "c++", "g++")
"""Clang first: its AVX2 code is up to 1.2 times as fast as GCC's on prompts."""


class NativeKernelsUnavailable(Exception):
    """Raised with the reason if this machine cannot build or run the kernels."""


@dataclass(frozen=True)
class Level:
    """Instruction level of a kernel library."""

    name: str
    flags: tuple[str, ...]
    """Required flags in /proc/cpuinfo."""
    options: tuple[str, ...]
    """Options of GCC and Clang."""


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_TILES = "-DNATIVE_TILES=1"


def _x86(name: str, flags: tuple[str, ...], *options: str, also: tuple[str, ...] = ()) -> Level:
    return Level(name, (*flags, *also), (*("-m" + flag.replace("_", "") for flag in flags), *options))


LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        _x86("amx", _AVX512_BF16, _TILES, also=("amx_tile", "amx_bf16")),
        _x86("avx512_bf16", _AVX512_BF16),
        _x86("avx512", _AVX512),
        _x86("avx2", _AVX2),
    ),
    "aarch64": (
        Level("neon_bf16", ("asimd", "bf16"), ("-march=armv8.2-a+bf16",)),
        Level("neon", ("asimd",), ("-march=armv8-a",)),
    ),
}
"""Levels by machine name, the fastest first.

avx512, avx2 and neon form sums in the same order, with the same bits. amx, avx512_bf16 and neon_bf16 round pairs of
products, each in its own way.
"""


def processor_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's instruction flags; empty if the system does not list them."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return set(next(named, ()))


def choose_level(requested: str = AUTO, *, machine: str = "", cpuinfo: Path = CPUINFO) -> Level:
    """Return the requested level, or for `auto` the fastest that the processor supports.

    Raises: NativeKernelsUnavailable if no level fits, or the processor lacks instructions of the requested level.
    """
    machine = machine or platform.machine()
    levels, flags = LEVELS.get(machine, ()), processor_flags(cpuinfo)
    if not levels:
        raise NativeKernelsUnavailable(f"no kernels exist for {machine} processors")
    if requested == AUTO:
        candidates = levels
    else:
        candidates = tuple(level for level in levels if level.name == requested)
        if not candidates:
            known = ", ".join(level.name for level in levels)
            raise NativeKernelsUnavailable(f"{machine} has no level {requested}: choose from {known}")
    for level in candidates:
        if flags.issuperset(level.flags):
            return level
    missing = ", ".join(flag for flag in candidates[-1].flags if flag not in flags)
    raise NativeKernelsUnavailable(f"the processor ({machine}) does not have {missing}")


def find_compilers() -> list[str]:
    """Return the paths of the C++ compilers of this machine, the preferred one first."""
    return [path for path in map(shutil.which, COMPILERS) if path is not None]
