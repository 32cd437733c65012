"""Building the native CPU kernels with a compiler of this machine, once, and registering them with XLA."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.kernels import cpu_native
from rayserve_moe.kernels.cpu_native.calls import TARGETS
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS

SOURCES = Path(next(iter(cpu_native.__path__)))
MAIN_SOURCE = "native.cc"
CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma")
"""What the kernels are written in, as /proc/cpuinfo names it."""
CPU_OPTIONS = tuple("-m" + flag.replace("_", "") for flag in CPU_FLAGS)
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
BUILD_TIMEOUT_S = 300.0


class NativeKernelsUnavailable(Exception):
    """This machine cannot build or run the kernels; says why."""


@cache
def register_native_kernels() -> None:
    """Build the library if this machine has not yet, load it, and register its kernels. NativeKernelsUnavailable."""
    check_cpu(Path("/proc/cpuinfo"))
    library = build(default_cache_directory() / "native")
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeKernelsUnavailable(f"{library} cannot be loaded: {error}") from error
    for name, symbol in TARGETS.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")


def check_cpu(cpuinfo: Path) -> None:
    """Refuse a processor without the instructions, or of unknown ones."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    if missing := [flag for flag in CPU_FLAGS if flag not in flags]:
        raise NativeKernelsUnavailable(f"the processor ({platform.machine()}) does not have {', '.join(missing)}")


def build(directory: Path) -> Path:
    """Path of the library, compiled now unless `directory` has it: it is named by what it was made from and how."""
    options = [*OPTIONS, *CPU_OPTIONS, *DEFINITIONS]
    recipe = hashlib.sha256(repr((options, jax.__version__)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cc", ".h"}:
            recipe.update(source.name.encode() + source.read_bytes())
    library = directory / f"kernels-{recipe.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeKernelsUnavailable(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as here:
            partial = Path(here) / library.name
            _compile([compiler, *options, f"-isystem{jax.ffi.include_dir()}", str(SOURCES / MAIN_SOURCE)], partial)
            partial.replace(library)
    except OSError as error:
        raise NativeKernelsUnavailable(f"the kernels cannot be written: {error}") from error
    return library


def _compile(command: list[str], target: Path) -> None:
    try:
        subprocess.run(
            [*command, "-o", str(target)], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NativeKernelsUnavailable(f"{command[0]} takes longer than {BUILD_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeKernelsUnavailable(f"{command[0]} fails: {last}") from error
