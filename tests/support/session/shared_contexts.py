"""Shared MLIR contexts for the programs that a test process lowers.

Jax makes a context for every program: 5 ms, half of the time of a small program. A context keeps the constants of all
its programs, so a thread takes a new one after `MAX_PROGRAMS`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

MAX_PROGRAMS = 64
"""Maximum number of programs lowered in one context."""


class _Latest(threading.local):
    """Current context of a thread, and the number of further programs that it takes."""

    context: ir.Context | None = None
    num_left = 0


class SharedContexts:
    """Shares one context among consecutive programs of a thread, while started."""

    def __init__(self) -> None:
        self._patch, self._latest = pytest.MonkeyPatch(), _Latest()

    def start(self) -> None:
        """Share contexts."""
        begin = mlir.ModuleContext.__init__

        def begin_in_shared(made: mlir.ModuleContext, /, *, context: ir.Context | None = None, **fields: Any) -> None:
            begin(made, context=context or self._next(), **fields)

        self._patch.setattr(mlir.ModuleContext, "__init__", begin_in_shared)

    def stop(self) -> None:
        """Lower every program in a context of its own."""
        self._patch.undo()

    def _next(self) -> ir.Context:
        latest = self._latest
        if latest.context is None or not latest.num_left:
            latest.context, latest.num_left = mlir.make_ir_context(), MAX_PROGRAMS
        latest.num_left -= 1
        return latest.context
