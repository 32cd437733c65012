"""Levels of instructions that the native CPU kernels are compiled for, and which of them a processor has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AUTO = "auto"


class NativeKernelsUnavailable(Exception):
    """This machine cannot build or run the kernels; says why."""


@dataclass(frozen=True)
class Level:
    """Instructions that one library needs."""

    name: str
    flags: tuple[str, ...]
    """Names in /proc/cpuinfo that the processor must have."""
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
"""By the machine's name, the fastest first. Sums are formed in the same order, and have the same bits, on avx512, avx2
and neon; amx, avx512_bf16 and neon_bf16 round pairs of products otherwise, each in its own way."""


def processor_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the instructions that the processor names, empty if the system does not say."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return set(next(named, ()))


def choose_level(requested: str = AUTO, *, machine: str = "", cpuinfo: Path = CPUINFO) -> Level:
    """Return the requested level, or for `auto` the fastest that the processor has.

    Raises: NativeKernelsUnavailable if there is none, or the processor lacks instructions of the requested one.
    """
    machine = machine or platform.machine()
    levels, flags = LEVELS.get(machine, ()), processor_flags(cpuinfo)
    if not levels:
        raise NativeKernelsUnavailable(f"there are no kernels for processors of the kind {machine}")
    if requested == AUTO:
        candidates = levels
    else:
        candidates = tuple(level for level in levels if level.name == requested)
        if not candidates:
            known = ", ".join(level.name for level in levels)
            raise NativeKernelsUnavailable(f"{machine} has no level {requested}: take one of {known}")
    for level in candidates:
        if flags.issuperset(level.flags):
            return level
    missing = ", ".join(flag for flag in candidates[-1].flags if flag not in flags)
    raise NativeKernelsUnavailable(f"the processor ({machine}) does not have {missing}")
