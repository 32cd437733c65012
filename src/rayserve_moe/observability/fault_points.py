"""Named points in the code at which a test can inject a rare fault. Nothing else uses them.

A point that is not armed costs a check of an empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ARMED: dict[str, Callable[[Any], object]] = {}


def arm(name: str, action: Callable[[Any], object]) -> None:
    """Call `action` once with the point's subject when this process reaches the point next."""
    _ARMED[name] = action


def disarm() -> None:
    """Remove all actions."""
    _ARMED.clear()


def reach(name: str, subject: Any) -> None:
    """Mark a point between two statements at which a fault may occur."""
    if _ARMED and (action := _ARMED.pop(name, None)) is not None:
        action(subject)
