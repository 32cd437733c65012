"""Engines of tests, each started once and kept for as long as the process has memory mappings left for programs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayserve_moe import Engine

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 15_000
"""Linux gives a process 65,530, beyond which XLA's compiler crashes. The programs of an engine take up to 8,000."""


class EngineStore:
    """Call it with settings for the engine that `start` returns for them, the same one as before if it still runs.

    `started` holds all that run. Before another starts, those that the running test did not ask for are shut down
    where mappings run short, the one that was not asked for the longest first; `pinned` ones stay.
    """

    def __init__(self, start: Callable[..., Engine], started: list[Engine]) -> None:
        self._start, self._started = start, started
        self._by_settings: dict[str, Engine] = {}
        self._in_use: set[str] = set()
        self._test = ""
        self._pinned: set[str] = set()

    def __call__(self, **settings: Any) -> Engine:
        key, test = _key_of(settings), os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test != self._test:
            self._in_use, self._test = set(), test
        engine = self._by_settings.pop(key, None)
        if engine is None:
            self._make_way()
            engine = self._start(**settings)
            self._started.append(engine)
        self._by_settings[key] = engine  # the latest is the last
        self._in_use.add(key)
        return engine

    def pinned(self, **settings: Any) -> Engine:
        """Return an engine that fixtures of a session hold."""
        self._pinned.add(_key_of(settings))
        return self(**settings)

    @contextmanager
    def held(self, **settings: Any) -> Generator[Engine]:
        """An engine that a fixture of a module holds: pinned within the block."""
        key = _key_of(settings)
        held = {key} - self._pinned
        self._pinned |= held
        try:
            yield self(**settings)
        finally:
            self._pinned -= held

    def close(self) -> None:
        """Shut down every engine."""
        for key in list(self._by_settings):
            self._shut_down(key)

    def _make_way(self) -> None:
        for key in [key for key in self._by_settings if key not in self._in_use | self._pinned]:
            if num_mappings() <= MOST_MAPPINGS:
                return
            self._shut_down(key)
            gc.collect()

    def _shut_down(self, key: str) -> None:
        engine = self._by_settings.pop(key)
        self._started.remove(engine)
        engine.shutdown()


def _key_of(settings: dict[str, Any]) -> str:
    return repr(sorted(settings.items()))


def num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.exists() else 0
