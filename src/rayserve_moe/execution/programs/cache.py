"""Compiled programs on disk, found by a key of all that determines them.

A program is found without tracing it, so its key holds what tracing would have shown: the source of every package that
a program can be built from, its arguments, and the config that it is specialised for.
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
MOST_BYTES = 2 << 30
"""Of one rank."""
PACKAGES_ABOVE = (
    "cli.py",
    "serving",
    "rollouts",
    "tools",
    "fleet",
    "cluster",
    "inprocess",
    "answers",
    "engine",
    "text",
)
"""Packages that nothing which is compiled can import."""
CACHE_OF_JAX = "jax_enable_compilation_cache"
NOT_IN_PROGRAMS = ("cache", "dump", "log", "timeout")
"""Settings of jax with these in their names leave programs as they are."""
NOT_PORTABLE = (
    *(jax.errors.JaxRuntimeError, NotImplementedError, pickle.PickleError, ImportError),
    *(ValueError, TypeError, LookupError, AttributeError),
)
"""Raised by a program, or a file, that cannot be written or loaded."""
_COMPILING = Lock()
"""Held where settings of jax are changed that belong to the whole process."""


class KeptPrograms:
    """Programs for the devices of `plan`, this process's part of them, in `files`."""

    def __init__(self, files: ProgramFiles, plan: ParallelPlan) -> None:
        self._files, self._devices = files, list(plan.mesh.devices.flat)
        self._surroundings = "\n".join(_surroundings(plan))

    def find(self, signature: str) -> Any | None:
        """The program that was kept under this signature, ready to be called; None where there is none."""
        payload = self._files.read(self._key(signature))
        if payload is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), backend=self._devices[0].client, execution_devices=self._devices
            )
        except NOT_PORTABLE as error:
            log.warning("a program on disk cannot be loaded, and is compiled again: %s", error)
            return None

    def keep(self, signature: str, compiled: Any) -> None:
        """Write a program for later starts."""
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except NOT_PORTABLE as error:
            log.warning("a compiled program is not kept: %s", error)
            return
        self._files.write(self._key(signature), payload)

    def _key(self, signature: str) -> str:
        return hashlib.sha256(f"{self._surroundings}\n{signature}".encode()).hexdigest()


def kept_programs(settings: CompileSettings, plan: ParallelPlan) -> KeptPrograms | None:
    """Where programs for `plan` are kept, None where they are not.

    SettingsError for a directory that was asked for and cannot be written, or that others can write to; where `auto`
    finds none, programs are compiled anew at every start.
    """
    if settings.cache == "off":
        return None
    is_ours = settings.cache == "auto"
    root = default_cache_directory() if is_ours else Path(settings.cache).expanduser()
    directory = root / "executables" / f"{jax.process_index()}-of-{jax.process_count()}"
    try:
        return KeptPrograms(ProgramFiles(directory, most_bytes=MOST_BYTES), plan)
    except OSError as error:
        if not is_ours:
            raise SettingsError(f"compile_cache {settings.cache}: {error}") from error
        log.warning("compiled programs are not kept: %s", error)
        return None


@contextmanager
def without_cache_of_jax() -> Generator[None]:
    """Compile inside, one caller at a time, without jax's own cache: programs from it cannot be kept.

    A CPU program that came out of it can be written and loaded, and fails when it is called.
    """
    with _COMPILING, ExitStack() as undo:
        undo.callback(_switch_cache_of_jax, jax.config.values[CACHE_OF_JAX])
        _switch_cache_of_jax(False)
        yield


def _switch_cache_of_jax(is_on: bool) -> None:
    jax.config.update(CACHE_OF_JAX, is_on)
    compilation_cache.reset_cache()  # jax decides once whether it has one


def signature_of(function: partial[Any], *args: Any, **named: Any) -> str:
    """What identifies a program of this server: a partial function, and shapes and shardings of its arguments."""
    leaves, tree = jax.tree.flatten((args, named))
    shapes = [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), leaf.sharding) for leaf in leaves]
    fixed = {name: _name(value) if callable(value) else value for name, value in sorted(function.keywords.items())}
    return f"{_name(function.func)} {fixed}\n{tree}\n{shapes}"


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _surroundings(plan: ParallelPlan) -> Iterator[str]:
    """All that determines a program besides its signature, one after the other."""
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
    """A hash over the source of everything that a program can be built from, native kernels too."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.suffix in {".py", ".cc", ".h"} and inside.parts[0] not in PACKAGES_ABOVE:
            digest.update(f"{inside}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """How many processors share the work of a program, and what they can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return f"{len(os.sched_getaffinity(0))} of {kinds}"
