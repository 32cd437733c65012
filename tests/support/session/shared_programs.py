"""Programs of engines in jax's own cache, which finds them by their text: a change compiles only what it changes.

The package keeps programs by its source, finds them without tracing, and disables jax's cache while it compiles, since
a program that came out of that cache cannot be kept. In tests both are used.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import jax.monitoring
import pytest

from rayserve_moe.execution.programs import cache, compiled

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class _Latest(threading.local):
    """Whether the latest program of a thread came out of jax's cache."""

    is_hit = False


class SharedPrograms:
    """While started, engines take programs from jax's cache as well, and keep only those that they compiled."""

    def __init__(self) -> None:
        self._patch, self._latest = pytest.MonkeyPatch(), _Latest()
        jax.monitoring.register_event_listener(self._note_hit)

    def start(self) -> None:
        """Begin to share programs."""
        optimized, keep = compiled.optimized, cache.KeptPrograms.keep

        def noted(*args: Any, **named: Any) -> Any:
            self._latest.is_hit = False
            return optimized(*args, **named)

        def keep_compiled(kept: cache.KeptPrograms, key: str, program: Any) -> None:
            if not self._latest.is_hit:
                keep(kept, key, program)

        self._patch.setattr(compiled, "optimized", noted)
        self._patch.setattr(cache.KeptPrograms, "keep", keep_compiled)
        self._patch.setattr(compiled, "without_cache_of_jax", nullcontext)

    def stop(self) -> None:
        """Compile and keep programs as for users."""
        self._patch.undo()

    def _note_hit(self, event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            self._latest.is_hit = True
