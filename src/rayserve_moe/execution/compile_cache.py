"""Keeping compiled programs on disk, so that the next start of the same server finds them.

jax keys a program by its text, its options, and the versions of jax and of the platform. Where the machine's own
instructions are compiled in, each kind of CPU gets a directory of its own, for directories that machines share.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.config.settings import CompileSettings, SettingsError

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""Beyond this, programs that were not used for the longest time are dropped."""


@contextmanager
def programs_on_disk(settings: CompileSettings, *, platform: str) -> Generator[None]:
    """Look for programs on disk, and leave them there, in everything that is compiled inside; whoever compiles it.

    With `auto`, a cache that jax has been given already stays in charge. SettingsError for a directory that was asked
    for and cannot be written; where `auto` finds none, programs are compiled anew at every start.
    """
    if settings.cache == "auto" and jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    with _jax_settings(_cache_options(_directory(settings, platform))), warnings.catch_warnings():
        # A damaged file costs compiling once more, and no more than that.
        warnings.filterwarnings("default", message="Error (reading|writing) persistent compilation cache")
        yield


def _directory(settings: CompileSettings, platform: str) -> Path | None:
    """Where programs for this machine are; None where they are not kept."""
    # In a group only the first process writes, and CPU processes do not find each other's programs.
    if settings.cache == "off" or (platform == "cpu" and jax.process_count() > 1):
        return None
    is_ours = settings.cache == "auto"
    root = default_cache_directory() / "programs" if is_ours else Path(settings.cache).expanduser()
    directory = root / (_cpu_kind() if platform == "cpu" else platform)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _drop_unfinished(directory)
    except OSError as error:
        if not is_ours:
            raise SettingsError(f"compile_cache {settings.cache}: {error}") from error
        log.warning("compiled programs are not kept: %s", error)
        return None
    return directory


def _drop_unfinished(directory: Path) -> None:
    """Remove what a process left that ended while it wrote: a program without the time of its last use."""
    for program in directory.glob("*-cache"):
        if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
            program.unlink(missing_ok=True)


def _cpu_kind() -> str:
    """A name for CPUs of one model with the same instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "cpu-" + hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]


def _cache_options(directory: Path | None) -> dict[str, object]:
    return {
        "jax_enable_compilation_cache": directory is not None,
        "jax_compilation_cache_dir": str(directory) if directory is not None else None,
        "jax_compilation_cache_max_size": MOST_BYTES,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_enable_xla_caches": "none",
    }


@contextmanager
def _jax_settings(options: dict[str, object]) -> Generator[None]:
    """Settings of the whole process, put back at the end."""
    before = {name: jax.config.values[name] for name in options}
    _update(options)
    try:
        yield
    finally:
        _update(before)


def _update(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # jax opens a cache once: without this it stays with the first directory.
    compilation_cache.reset_cache()
