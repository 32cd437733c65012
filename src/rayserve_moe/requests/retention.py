"""Hints of clients about cached pages."""

from __future__ import annotations

from typing import NamedTuple


class Retention(NamedTuple):
    """Hints about the cached pages of a request. They change the order of eviction, never an answer."""

    protected: tuple[tuple[int, float], ...] = ()
    """Pairs of a number of first tokens, and the seconds after the request's end for which they are protected."""
    ends_session: bool = False
    """True if its session has no further request."""


NO_RETENTION = Retention()
