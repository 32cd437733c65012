"""Engine programs in jax's own cache, which finds them by their text, so a change recompiles only what it affects.

The package keeps programs by its source, finds them without tracing, and disables jax's cache while it compiles: on
CPUs a program that came out of that cache, and is written anew, fails when it is called. Here it is kept as jax has it.
Loading one takes a fifth of a second, so engines of a process that run the same program at a time share the loaded one.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import pytest
from jax._src import compilation_cache
from jax._src.lib import _jax
from jax.experimental import serialize_executable

from rayserve_moe.execution.programs import compiled
from rayserve_moe.execution.programs.cache import KeptPrograms

_Pickler = serialize_executable._JaxPjrtPickler


class _Latest(threading.local):
    """Latest engine program of a thread as found in jax's cache; None if it was compiled."""

    stored: bytes | None = None
    is_engine = False
    """True while the thread compiles an engine program."""


class SharedPrograms:
    """Shares compiled engine programs through jax's cache, and loaded ones between engines, while started."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._loaded: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()
        """Programs that an engine holds, by their directory and key."""

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
        self._share_loaded()

    def _share_loaded(self) -> None:
        find, keep, loaded = KeptPrograms.find, KeptPrograms.keep, self._loaded

        def place_of(kept: KeptPrograms, key: str) -> tuple[str, str]:
            return str(kept._files._directory), kept._key(key)

        def found(kept: KeptPrograms, key: str) -> Any | None:
            program = loaded.get(place := place_of(kept, key))
            if program is None and (program := find(kept, key)) is not None:
                loaded[place] = program
            return program

        def noted(kept: KeptPrograms, key: str, program: Any) -> None:
            keep(kept, key, program)
            loaded[place_of(kept, key)] = program

        self._patch.setattr(KeptPrograms, "find", found)
        self._patch.setattr(KeptPrograms, "keep", noted)

    def stop(self) -> None:
        """Compile programs as for users."""
        self._patch.undo()
