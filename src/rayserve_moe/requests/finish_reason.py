"""Why choices end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinishReason:
    """Why a choice ended: `stop` (matched id, string or pattern), `length`, `repetition`, `abort`, or `error` (with its
    message).

    An error that a field of its request is the `source` of is part of the answer, and no failure.
    """

    kind: str
    matched: int | str | None = None
    message: str | None = None
    source: str | None = None


LENGTH = FinishReason("length")
