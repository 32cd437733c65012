"""How a setting states its key, its bounds and its choices."""

from __future__ import annotations

from dataclasses import field
from typing import Any

DAY_S = 86_400.0
_NO_KEY = ""


def named(default: Any, key: str, *aliases: str) -> Any:
    """A setting with a key, and other keys, of its own."""
    return field(default=default, metadata={"key": key, "aliases": aliases})


def number(default: Any, bounds: tuple[float, float], *names: str) -> Any:
    """A number, or several, each of which may be `bounds[0]` to `bounds[1]`; `names` are its key, and other keys."""
    named = {"key": names[0], "aliases": names[1:]} if names else {}
    return field(default=default, metadata={"bounds": bounds, **named})


def choice(default: str, *others: str, key: str = _NO_KEY) -> Any:
    """One of a few words."""
    return field(default=default, metadata={"choices": (default, *others), **({"key": key} if key else {})})
