"""Candidates for an operation: implementations in order of preference, and the choice of the first usable candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

Implementation = TypeVar("Implementation")
SEPARATE = "separate"
"""Name of the choice if no candidate computes several operations at once, and each is computed by itself."""


def supports_all(*_: Any, **__: Any) -> str:
    """Return no reason: the candidate takes calls of any sizes."""
    return ""


@dataclass(frozen=True)
class Candidate(Generic[Implementation]):
    """An implementation of an operation."""

    name: str
    """Name in logs and reports."""
    run: Implementation
    """A function with the signature of the operation's reference, or a record of such functions."""
    unsupported_reason: Callable[..., str] = supports_all
    """Return why a call is unsupported; empty if it is supported.

    It takes the arguments of the call and reads their shapes and dtypes only, so `ShapeDtypeStruct`s do as well.
    """


Function = Candidate[Callable[..., Any]]


def bound(candidate: Function, **named: Any) -> Function:
    """Return a candidate with keyword arguments bound in both of its functions."""
    reason = partial(candidate.unsupported_reason, **named)
    return replace(candidate, run=partial(candidate.run, **named), unsupported_reason=reason)


@dataclass(frozen=True)
class Choice(Generic[Implementation]):
    """The candidate that computes a call, and the reasons against the candidates before it."""

    candidate: Candidate[Implementation] | None
    """None if the operations of a fused call are computed separately."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Reasons by name of candidate, in order of preference."""

    @property
    def name(self) -> str:
        """Return the name of the candidate, or `SEPARATE`."""
        return self.candidate.name if self.candidate else SEPARATE

    def __str__(self) -> str:
        """Return the name, with the reasons against the candidates before it in brackets."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())
        return f"{self.name} ({reasons})" if reasons else self.name


def choose(candidates: Sequence[Candidate[Implementation]], *arguments: Any, **named: Any) -> Choice[Implementation]:
    """Return the first candidate that supports a call with these arguments."""
    rejected: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.unsupported_reason(*arguments, **named)
        if not reason:
            return Choice(candidate, rejected)
        rejected[candidate.name] = reason
    return Choice(None, rejected)


@dataclass(frozen=True)
class Operation:
    """An operation with several implementations. Calling it runs the chosen candidate."""

    candidates: tuple[Function, ...] = ()
    """In order of preference. The last candidate supports every call, unless the operation is fused."""

    def choose(self, *arguments: Any, **named: Any) -> Choice[Callable[..., Any]]:
        """Return the choice for a call with these arguments; only shapes and dtypes count."""
        return choose(self.candidates, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the chosen candidate; AssertionError if no candidate takes the call."""
        choice = self.choose(*arguments, **named)
        assert choice.candidate is not None, f"no candidate takes this call: {choice}"
        return choice.candidate.run(*arguments, **named)

    def with_first(self, candidate: Function) -> Operation:
        """Return the operation with a further candidate, which is preferred to all others."""
        return Operation((candidate, *self.candidates))


NO_CANDIDATES = Operation()
"""Candidates of a fused operation in a table that computes its parts separately."""


def operation(name: str, run: Callable[..., Any]) -> Operation:
    """Return an operation with a single implementation."""
    return Operation((Candidate(name, run),))
