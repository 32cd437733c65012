"""Compiled programs on disk, found by a key of all that determines them.

A program is found without tracing it, so its key covers everything that tracing would depend on: the source of all
packages that a program can be built from, its arguments, and the config that it is specialised for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from rayserve_moe.config.load import compiler_environment, default_cache_directory
from rayserve_moe.config.settings import CompileSettings, SettingsError
from rayserve_moe.execution.programs.files import ProgramFiles
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 2 << 30
"""Maximum bytes of a rank's programs."""
PACKAGES_ABOVE = (
    "cli.py",
    "serving",
    "rollouts",
    "bench",
    "tools",
    "fleet",
    "cluster",
    "inprocess",
    "answers",
    "engine",
    "text",
)
"""Packages that compiled code cannot import."""
CACHE_OF_JAX = "jax_enable_compilation_cache"
NOT_IN_PROGRAMS = ("cache", "dump", "log", "timeout")
"""Settings of jax whose names contain these strings do not affect programs."""
NOT_PORTABLE = (
    *(jax.errors.JaxRuntimeError, NotImplementedError, pickle.PickleError, ImportError),
    *(ValueError, TypeError, LookupError, AttributeError),
)
"""Errors raised for a program or a file that cannot be written or loaded."""
_COMPILING = Lock()
"""Held while process-wide settings of jax are changed."""


class KeptPrograms:
    """Programs on disk for the devices of `plan`, as compiled by this process."""

    def __init__(self, files: ProgramFiles, plan: ParallelPlan) -> None:
        self._files, self._devices = files, list(plan.mesh.devices.flat)
        self._surroundings = "\n".join(_surroundings(plan))

    def find(self, key: str) -> Any | None:
        """Return the program with this key, loaded; None if it is not on disk."""
        payload = self._files.read(self._key(key))
        if payload is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), backend=self._devices[0].client, execution_devices=self._devices
            )
        except NOT_PORTABLE as error:
            log.warning("a program on disk cannot be loaded, recompiling it: %s", error)
            return None

    def keep(self, key: str, compiled: Any) -> None:
        """Write a program for later starts."""
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except NOT_PORTABLE as error:
            log.warning("a compiled program is not kept: %s", error)
            return
        self._files.write(self._key(key), payload)

    def _key(self, key: str) -> str:
        return hashlib.sha256(f"{self._surroundings}\n{key}".encode()).hexdigest()


def kept_programs(settings: CompileSettings, plan: ParallelPlan) -> KeptPrograms | None:
    """Return the store of programs for `plan`, or None if programs are not kept.

    With `auto`, an unusable directory means that programs are compiled at every start.

    Raises: SettingsError if the configured directory cannot be written, or others can write to it.
    """
    if settings.cache == "off":
        return None
    is_ours = settings.cache == "auto"
    root = default_cache_directory() if is_ours else Path(settings.cache).expanduser()
    directory = root / "executables" / f"{jax.process_index()}-of-{jax.process_count()}"
    try:
        return KeptPrograms(ProgramFiles(directory, max_bytes=MAX_BYTES), plan)
    except OSError as error:
        if not is_ours:
            raise SettingsError(f"compile_cache {settings.cache}: {error}") from error
        log.warning("compiled programs are not kept: %s", error)
        return None


@contextmanager
def without_cache_of_jax() -> Generator[None]:
    """Disable jax's own compilation cache inside the context; a single thread enters at a time.

    Programs from that cache cannot be kept: a CPU program that came out of it can be written and loaded, but fails when
    it is called.
    """
    with _COMPILING, ExitStack() as undo:
        undo.callback(_switch_cache_of_jax, jax.config.values[CACHE_OF_JAX])
        _switch_cache_of_jax(False)
        yield


def _switch_cache_of_jax(is_on: bool) -> None:
    jax.config.update(CACHE_OF_JAX, is_on)
    compilation_cache.reset_cache()  # jax decides once whether it has one


def program_key(function: partial[Any], *args: Any, **named: Any) -> str:
    """Return the cache key of a program: function, shapes and shardings."""
    leaves, tree = jax.tree.flatten((args, named))
    shapes = [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), leaf.sharding) for leaf in leaves]
    fixed = {name: _name(value) if callable(value) else value for name, value in sorted(function.keywords.items())}
    return f"{_name(function.func)} {fixed}\n{tree}\n{shapes}"


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _surroundings(plan: ParallelPlan) -> Iterator[str]:
    """Yield all that determines a program besides its key."""
    devices = list(plan.mesh.devices.flat)
    yield f"{FORMAT} {jax.__version__} {jaxlib.__version__} {devices[0].client.platform_version}"
    yield f"process {jax.process_index()} of {jax.process_count()}"
    yield str([(repr(device), device.device_kind, device.process_index) for device in devices])
    yield str(sorted((k, v) for k, v in jax.config.values.items() if not any(part in k for part in NOT_IN_PROGRAMS)))
    yield str(compiler_environment())
    yield source_digest()
    if platform_of(plan.mesh) == "cpu":
        yield _cpu_features()


@cache
def source_digest() -> str:
    """Return a hash over the source of everything that a program can be built from, including native kernels."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.suffix in {".py", ".cc", ".h"} and inside.parts[0] not in PACKAGES_ABOVE:
            digest.update(f"{inside}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """Return the number and the features of the processors that run programs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return f"{len(os.sched_getaffinity(0))} of {kinds}"
