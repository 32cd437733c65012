"""Engine programs in jax's own cache, which finds them by their text, so a change recompiles only what it affects.

The package keeps programs by its source, finds them without tracing, and disables jax's cache while it compiles: on
CPUs a program that came out of that cache, and is written anew, fails when it is called. Here it is kept as jax has it.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from jax._src import compilation_cache
from jax._src.lib import _jax
from jax.experimental import serialize_executable

from rayserve_moe.execution.programs import compiled

_Pickler = serialize_executable._JaxPjrtPickler


class _Latest(threading.local):
    """Latest engine program of a thread as found in jax's cache; None if it was compiled."""

    stored: bytes | None = None
    is_engine = False
    """True while the thread compiles an engine program."""


class SharedPrograms:
    """Shares engine programs through jax's cache while started."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def start(self) -> None:
        """Begin to share programs."""
        latest, optimized, extract = _Latest(), compiled.optimized, compilation_cache.extract_executable_and_time

        def from_cache(entry: bytes) -> tuple[bytes, int]:
            program, seconds = extract(entry)
            if latest.is_engine:
                latest.stored = program
            return program, seconds

        def noted(*args: Any, **named: Any) -> Any:
            latest.stored, latest.is_engine = None, True
            try:
                return optimized(*args, **named)
            finally:
                latest.is_engine = False

        class Pickler(_Pickler):
            def persistent_id(self, obj: object) -> Any:
                is_program = isinstance(obj, (_jax.LoadedExecutable, _jax.Executable))
                return ("exec", latest.stored) if is_program and latest.stored else super().persistent_id(obj)

        self._patch.setattr(compilation_cache, "extract_executable_and_time", from_cache)
        self._patch.setattr(compiled, "optimized", noted)
        self._patch.setattr(serialize_executable, "_JaxPjrtPickler", Pickler)
        self._patch.setattr(compiled, "without_cache_of_jax", nullcontext)

    def stop(self) -> None:
        """Compile programs as for users."""
        self._patch.undo()
