"""Trace of the package at run time: functions in the order of their first calls, and the package's types."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

PACKAGE = "rayserve_moe"
NAMED_TUPLE = "namedtuple_"
"""Prefix of the module in which the constructor of a named tuple runs."""


@dataclass
class Trace:
    """Functions and types that a block of code uses, in the order of first use."""

    functions: dict[str, None] = field(default_factory=dict)
    """Names `package/module.Class.function`; functions that class decorators generate are left out."""
    used: dict[type, None] = field(default_factory=dict)
    """Types with a called method."""
    created: dict[type, None] = field(default_factory=dict)
    """Types with a new instance. A type constructed outside Python code, such as a pydantic model, is found when an
    instance is an argument or a result of a function of the package."""

    @property
    def packages(self) -> list[str]:
        """Return the packages whose functions have run."""
        return list(dict.fromkeys(name.split(".")[0].split("/")[0] for name in self.functions))

    @property
    def modules(self) -> list[str]:
        """Return the modules whose functions have run."""
        return list(dict.fromkeys(name.split(".")[0] for name in self.functions))

    @property
    def types(self) -> list[str]:
        """Return the sorted names of the types that were created or used."""
        return names_of({**self.created, **self.used})


class Tracer:
    """Profiler of this thread and of threads that start while it is installed; it records inside `recording`."""

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._known: dict[int, object] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hook; a thread is profiled only if it starts inside the block."""
        before = sys.getprofile()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record the functions and types that run inside the block, on any profiled thread."""
        # Hold the existing instances so that no new instance reuses the id of a freed instance.
        self._known = {id(each): each for each in gc.get_objects() if _is_ours(type(each))}
        trace = self._trace = Trace()
        try:
            yield trace
        finally:
            self._trace, self._known = None, {}

    def _on_event(self, frame: FrameType, event: str, result: Any) -> None:
        trace = self._trace
        if trace is None or event not in ("call", "return"):
            return
        module = frame.f_globals.get("__name__") or ""
        if module.startswith((PACKAGE, NAMED_TUPLE)):
            if event == "return":
                self._record_instance(result, trace)
            elif module.startswith(PACKAGE):
                self._record_call(frame, module, trace)

    def _record_call(self, frame: FrameType, module: str, trace: Trace) -> None:
        code = frame.f_code
        if not code.co_filename.startswith("<"):
            trace.functions.setdefault(f"{_path(module)}.{code.co_qualname.replace('.<locals>', '')}")
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for i, name in enumerate(names):
            argument = frame.f_locals.get(name)
            self._record_instance(argument, trace)
            if i == 0 and name in ("self", "cls"):
                kind = argument if isinstance(argument, type) else type(argument)
                if _is_ours(kind):
                    trace.used.setdefault(kind)

    def _record_instance(self, value: Any, trace: Trace) -> None:
        kind = type(value)
        if kind not in trace.created and _is_ours(kind) and id(value) not in self._known:
            trace.created.setdefault(kind)


def names_of(types: dict[type, None]) -> list[str]:
    """Return the sorted names of types, each with its module."""
    return sorted(f"{_path(kind.__module__)}.{kind.__qualname__}" for kind in types)


@cache
def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith(PACKAGE)


def _path(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".").replace(".", "/")
