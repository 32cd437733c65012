"""Finish reasons of choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinishReason:
    """Reason for the end of a choice.

    An error with a `source` is part of the answer, not a failure of the server.
    """

    kind: str
    """`stop`, `length`, `repetition`, `abort` or `error`."""
    matched: int | str | None = None
    """Stop id, string or pattern."""
    message: str | None = None
    """Message of an error."""
    source: str | None = None
    """Request field that caused an error."""


LENGTH = FinishReason("length")
