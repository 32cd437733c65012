"""Random hints about cached pages, for laws that no hint may break."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.requests.retention import Retention

SESSIONS = (None, "a", "b", "c")


def random_session(generator: np.random.Generator) -> str | None:
    """Return the key of a session, or None."""
    return SESSIONS[generator.integers(len(SESSIONS))]


def random_retention(generator: np.random.Generator) -> Retention:
    """Return up to three protected ranges, some of which end at once or outlast everything."""
    ends = generator.choice([0, 1, 5, 20, 200, INT32_MAX], generator.integers(0, 4))
    protected = tuple((int(end), float(generator.choice([0.0, 1.0, 3.0, 31_536_000.0]))) for end in ends)
    return Retention(protected, ends_session=bool(generator.random() < 0.2))
