"""Hints of clients about cached pages."""

from __future__ import annotations

from typing import NamedTuple


class Retention(NamedTuple):
    """Hints about the cached pages of a request. They change the order of eviction, never an answer."""

    protected: tuple[tuple[int, float], ...] = ()
    """Pairs (number of first tokens, seconds of their protection after the end of the request)."""
    ends_session: bool = False
    """True if its session has no further request."""


NO_RETENTION = Retention()
