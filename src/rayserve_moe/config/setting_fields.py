"""Field declarations of settings: key, aliases, bounds and choices."""

from __future__ import annotations

from dataclasses import field
from typing import Any

DAY_S = 86_400.0
_NO_KEY = ""


def named(default: Any, key: str, *aliases: str) -> Any:
    """Return a field with its own key and aliases."""
    return field(default=default, metadata={"key": key, "aliases": aliases})


def number(default: Any, bounds: tuple[float, float], *names: str) -> Any:
    """Return a number field, or a list of numbers, with inclusive bounds; `names` are its key and aliases."""
    named = {"key": names[0], "aliases": names[1:]} if names else {}
    return field(default=default, metadata={"bounds": bounds, **named})


def choice(default: str, *others: str, key: str = _NO_KEY) -> Any:
    """Return a field with a fixed set of words."""
    return field(default=default, metadata={"choices": (default, *others), **({"key": key} if key else {})})
