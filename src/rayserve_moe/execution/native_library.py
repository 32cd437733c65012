"""The library of native CPU kernels of a level: shipped with the package, built before, or built now."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import jax

from rayserve_moe.config.load import default_cache_directory, environment_setting
from rayserve_moe.execution.native_levels import AUTO, Level, NativeKernelsUnavailable, choose_level
from rayserve_moe.kernels import cpu_native
from rayserve_moe.kernels.cpu_native.calls import TARGETS
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS

SOURCES = Path(next(iter(cpu_native.__path__)))
SHIPPED = SOURCES / "built"
"""Libraries that a wheel brings along: they need no compiler."""
COMPILERS = ("clang++", "c++", "g++")
"""Clang first: its code for AVX2 is up to 1.2 times as fast as GCC's on prompts."""
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fwrapv", "-ffp-contract=off", "-w")
BUILD_TIMEOUT_S = 900.0
_LOADING = Lock()
_loaded: list[Level] = []
"""The level that this process computes at, once it has loaded a library."""


def register_native_kernels(requested: str = AUTO) -> Level:
    """Load the library and register its kernels with jax, once in a process; returns its level.

    `requested` is a level's name; `auto` is what the environment asks for (`cpu_level`), else the processor's fastest.
    Raises: NativeKernelsUnavailable if the machine cannot, or the process has loaded another level.
    """
    requested = (environment_setting("cpu_level") or AUTO) if requested == AUTO else requested
    with _LOADING:
        level = choose_level(requested) if requested != AUTO or not _loaded else _loaded[0]
        if not _loaded:
            _register(find_or_build(level, default_cache_directory() / "native"))
            _loaded.append(level)
        elif level != _loaded[0]:
            raise NativeKernelsUnavailable(
                f"this process computes at level {_loaded[0].name} already: another one takes a process of its own"
            )
        return level


def _register(library: Path) -> None:
    try:
        loaded = ctypes.CDLL(str(library))
        for name, symbol in TARGETS.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")
    except (OSError, AttributeError) as error:
        raise NativeKernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def loaded_level() -> str:
    """Return the name of the level that this process computes at; empty before a library is loaded."""
    return _loaded[0].name if _loaded else ""


def find_or_build(level: Level, directory: Path) -> Path:
    """Return the path of a level's library: shipped, in `directory`, or built there now.

    Raises: NativeKernelsUnavailable.
    """
    name = library_name(level)
    for library in (SHIPPED / name, directory / name):
        if library.exists():
            return library
    return build(level, directory)


def library_name(level: Level) -> str:
    """Return a name that changes with the sources and how they are compiled, but not with the compiler."""
    recipe = hashlib.sha256(repr((OPTIONS, level.options, DEFINITIONS)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cc", ".h"}:
            recipe.update(source.name.encode() + source.read_bytes())
    return f"kernels-{level.name}-{recipe.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build(level: Level, directory: Path, *, compiler: str | None = None, options: tuple[str, ...] = ()) -> Path:
    """Compile a level's library into `directory`; each source on a core of its own. Returns its path.

    Another `compiler` than this machine's takes its `options` in addition.
    Raises: NativeKernelsUnavailable with the compiler's last line.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise NativeKernelsUnavailable(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    library = directory / library_name(level)
    flags = [*OPTIONS, *level.options, *DEFINITIONS, *options, f"-isystem{jax.ffi.include_dir()}"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as here:
            sources = sorted(SOURCES.glob("*.cc"))
            objects = [str(Path(here) / f"{source.stem}.o") for source in sources]
            with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
                commands = [
                    [compiler, *flags, "-c", str(source), "-o", target]
                    for source, target in zip(sources, objects, strict=True)
                ]
                list(pool.map(_run, commands))
            partial = Path(here) / library.name
            _run([compiler, "-shared", "-pthread", *options, *objects, "-o", str(partial)])
            partial.replace(library)
    except OSError as error:
        raise NativeKernelsUnavailable(f"the kernels cannot be written: {error}") from error
    return library


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeKernelsUnavailable(f"{command[0]} takes longer than {BUILD_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeKernelsUnavailable(f"{command[0]} fails: {last}") from error
