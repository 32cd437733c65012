"""Places in the code, by name, where a test has something happen that random faults rarely hit. Nothing else uses them.

A point that is not armed costs a look into an empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ARMED: dict[str, Callable[[Any], object]] = {}


def arm(name: str, action: Callable[[Any], object]) -> None:
    """Have `action` called, once, with what is at hand when the point is reached next in this process."""
    _ARMED[name] = action


def disarm() -> None:
    """Forget all actions."""
    _ARMED.clear()


def reach(name: str, subject: Any) -> None:
    """Mark the point: between two statements that a fault may come between."""
    if _ARMED and (action := _ARMED.pop(name, None)) is not None:
        action(subject)
