"""Random hints about cached pages, for laws that no hint may break."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.requests.retention import Retention

SESSIONS = (None, "a", "b", "c")


def random_session(generator: np.random.Generator) -> str | None:
    """Return a random session key or None."""
    return SESSIONS[generator.integers(len(SESSIONS))]


def random_retention(generator: np.random.Generator) -> Retention:
    """Return random hints: up to three ranges protected for 0 s to a year, and a session that may end."""
    ends = generator.choice([0, 1, 5, 20, 200, INT32_MAX], generator.integers(0, 4))
    protected = tuple((int(end), float(generator.choice([0.0, 1.0, 3.0, 31_536_000.0]))) for end in ends)
    return Retention(protected, ends_session=bool(generator.random() < 0.2))
