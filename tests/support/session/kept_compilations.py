"""Disk cache for the text and memory sizes of programs that tests compile for TPUs and GPUs.

Jax's own cache writes these programs, but cannot read them on a host without the device. The key of a program is a hash
of its code with source lines, its topology, and the compiler with its options.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax

from rayserve_moe.config.load import compiler_environment

ROOT = str(Path(__file__).parents[3]).encode()
LEVEL = 1
"""Compression level of gzip. Level 1 is the fastest."""


@dataclass(frozen=True)
class ReadProgram:
    """Text and memory sizes of a compiled program, which cannot run on this host."""

    text: str
    memory: dict[str, int]
    """Sizes in bytes, by their names in jax's `memory_analysis`."""

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> SimpleNamespace:
        return SimpleNamespace(**self.memory)


class KeptCompilations:
    """Caches programs for devices that this host does not have, in `folder`, while started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._patch = folder, pytest.MonkeyPatch()

    def start(self) -> None:
        """Look programs up in the folder before they are compiled."""
        self._folder.mkdir(parents=True, exist_ok=True)
        compile_anew, key_of_jax = jax.stages.Lowered.compile, compiler._get_cache_key

        def compiled(
            lowered: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None, **named: Any
        ) -> jax.stages.Compiled | ReadProgram:
            if named or not _is_for_others(lowered._lowering.compile_args["backend"]):
                return compile_anew(lowered, compiler_options, **named)
            path = self._folder / f"read-{_key_of(lowered, compiler_options or {})}.json.gz"
            found = _read(path)
            if found is None:
                found = _described(compile_anew(lowered, compiler_options))
                _write(path, found)
            return found

        def key(options: Any, backend: Any, *args: Any, **named: Any) -> str | None:
            return None if _is_for_others(backend) else key_of_jax(options, backend, *args, **named)

        self._patch.setattr(jax.stages.Lowered, "compile", compiled)
        self._patch.setattr(compiler, "_get_cache_key", key)

    def stop(self) -> None:
        """Compile all programs anew."""
        self._patch.undo()


def _is_for_others(backend: Any) -> bool:
    """Return True if the backend only compiles and has no devices."""
    return isinstance(backend, _jax.CompileOnlyPyClient)


def _key_of(lowered: jax.stages.Lowered, options: dict[str, Any]) -> str:
    """Return a hash of the code, the devices, the options and the compiler."""
    lowering = lowered._lowering
    backend = lowering.compile_args["backend"]
    surroundings = (
        *(jax.__version__, backend.platform_version, sorted(compiler_environment().items())),
        [(repr(device), device.device_kind) for device in backend.devices()],
        *(repr(lowering._device_list), lowering._compiler_options_kvs, sorted(options.items())),
    )
    code = mlir.module_to_bytecode(lowering._hlo).replace(ROOT, b"")
    return hashlib.sha256(repr(surroundings).encode() + code).hexdigest()


def _described(compiled: jax.stages.Compiled) -> ReadProgram:
    analysis = compiled.memory_analysis()
    names = [name for name in dir(analysis) if name.endswith("_in_bytes")]
    return ReadProgram(compiled.as_text() or "", {name: getattr(analysis, name) for name in names})


def _read(path: Path) -> ReadProgram | None:
    try:
        return ReadProgram(**json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, TypeError, zlib.error):
        return None


def _write(path: Path, program: ReadProgram) -> None:
    written = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    content = json.dumps({"text": program.text, "memory": program.memory}).encode()
    written.write_bytes(gzip.compress(content, compresslevel=LEVEL))
    os.replace(written, path)
