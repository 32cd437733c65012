"""Library of native CPU kernels at a level: shipped with the package, built earlier, or built now."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import jax

from rayserve_moe.config.load import default_cache_directory, environment_setting
from rayserve_moe.execution.native_levels import (
    AUTO,
    COMPILERS,
    Level,
    NativeKernelsUnavailable,
    choose_level,
    find_compilers,
)
from rayserve_moe.execution.programs.files import check_ours, make_private
from rayserve_moe.kernels import cpu_native
from rayserve_moe.kernels.cpu_native.calls import TARGETS
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS
from rayserve_moe.observability.progress import report

SOURCES = Path(next(iter(cpu_native.__path__)))
SHIPPED = SOURCES / "built"
"""Libraries included in a wheel, which need no compiler."""
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fwrapv", "-ffp-contract=off", "-w")
BUILD_TIMEOUT_S = 900.0
log = logging.getLogger(__name__)
_LOADING = Lock()
_loaded: list[Level] = []
"""The level of this process, once a library is loaded."""


def requested_level(setting: str = AUTO) -> str:
    """Return the level of a setting; for `auto` the environment's level, or `auto`."""
    return (environment_setting("cpu_level") or AUTO) if setting == AUTO else setting


def register_native_kernels(setting: str = AUTO) -> Level:
    """Load the library of the level that `cpu_level` selects, once per process; return the level.

    Raises: NativeKernelsUnavailable if the machine cannot, or the process has loaded another level.
    """
    requested = requested_level(setting)
    with _LOADING:
        level = choose_level(requested) if requested != AUTO or not _loaded else _loaded[0]
        if not _loaded:
            _load(level, default_cache_directory() / "native")
            _loaded.append(level)
        elif level != _loaded[0]:
            raise NativeKernelsUnavailable(
                f"this process already uses level {_loaded[0].name}: another level needs another process"
            )
        return level


def _load(level: Level, directory: Path) -> None:
    """Load a level's library; if a library in `directory` cannot be loaded, it is rebuilt."""
    library = find_or_build(level, directory)
    try:
        _register(library)
    except NativeKernelsUnavailable as error:
        if library.parent != directory:
            raise
        log.warning("%s; rebuilding it", error)
        _register(build(level, directory))


def _register(library: Path) -> None:
    try:
        loaded = ctypes.CDLL(str(library))
        for name, symbol in TARGETS.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")
    except (OSError, AttributeError) as error:
        raise NativeKernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def loaded_level() -> str:
    """Return the level of this process; empty before a library is loaded."""
    return _loaded[0].name if _loaded else ""


def find_or_build(level: Level, directory: Path) -> Path:
    """Return the path of a level's library: shipped, in `directory`, or built there now.

    Raises: NativeKernelsUnavailable, also if another user could have written to `directory`.
    """
    name = library_name(level)
    if (SHIPPED / name).exists():
        return SHIPPED / name
    library = directory / name
    try:
        make_private(directory)
        check_ours(library.lstat(), library)
    except FileNotFoundError:
        return build(level, directory)
    except OSError as error:
        raise NativeKernelsUnavailable(f"the kernels cannot be kept: {error}") from error
    return library


def library_name(level: Level) -> str:
    """Return a file name that depends on the sources and compile options, but not on the compiler."""
    recipe = hashlib.sha256(repr((OPTIONS, level.options, DEFINITIONS)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cc", ".h"}:
            recipe.update(source.name.encode() + source.read_bytes())
    return f"kernels-{level.name}-{recipe.hexdigest()[:16]}.so"


def build(level: Level, directory: Path, *, compiler: str | None = None, options: tuple[str, ...] = ()) -> Path:
    """Compile a level's library into the existing `directory`, each source on its own core; return the library's path.

    The compilers of this machine are tried in turn unless `compiler` is given. `options` are added to the command.

    Raises: NativeKernelsUnavailable with the last line of the last compiler.
    """
    compilers = find_compilers() if compiler is None else [compiler]
    if not compilers:
        raise NativeKernelsUnavailable(f"no C++ compiler was found ({', '.join(COMPILERS)})")
    report("building native kernels", detail=f"{level.name}, once; tens of seconds")
    for number, each in enumerate(compilers, 1):
        try:
            return _build_by(each, level, directory, options)
        except NativeKernelsUnavailable as error:
            if number == len(compilers):
                raise
            log.warning("%s; trying the next compiler", error)
    raise AssertionError("the last compiler returns or raises")


def _build_by(compiler: str, level: Level, directory: Path, options: tuple[str, ...]) -> Path:
    library = directory / library_name(level)
    flags = [*OPTIONS, *level.options, *DEFINITIONS, *options, f"-isystem{jax.ffi.include_dir()}"]
    try:
        with tempfile.TemporaryDirectory(dir=directory) as here:
            sources = sorted(SOURCES.glob("*.cc"))
            objects = [str(Path(here) / f"{source.stem}.o") for source in sources]
            commands = [
                [compiler, *flags, "-c", str(source), "-o", target]
                for source, target in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
                list(pool.map(_run, commands))
            partial = Path(here) / library.name
            _run([compiler, "-shared", "-pthread", *options, *objects, "-o", str(partial)])
            partial.chmod(0o700)
            partial.replace(library)
    except OSError as error:
        raise NativeKernelsUnavailable(f"the kernels cannot be written: {error}") from error
    return library


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeKernelsUnavailable(f"{command[0]} takes longer than {BUILD_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeKernelsUnavailable(f"{command[0]} fails: {last}") from error
