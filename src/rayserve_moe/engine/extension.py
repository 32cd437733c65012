"""Extensions of the step cycle: features that take part in steps without being known to the cycle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult


@dataclass(frozen=True)
class NewWeights:
    """Cause of a reset: other weights are active from the next step on."""

    weight_version: str
    are_sent: bool = False
    """True if a trainer has sent them, False if they come from files."""


@dataclass(frozen=True)
class RenamedWeights:
    """Cause of a reset: the same weights have another version from the next step on."""

    weight_version: str


@dataclass(frozen=True)
class ReplacedHosts:
    """Cause of a reset: other hosts run, without any of the previously submitted steps."""

    layout: GroupLayout


Reset = NewWeights | RenamedWeights | ReplacedHosts
"""Cause of a reset. No step is in flight."""


class StepExtension:
    """Base class of a feature that takes part in steps. A hook that is not overridden costs nothing.

    All hooks run in the engine thread. Each is called for all extensions, in their order.
    """

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Return the next step with additions. `before` is the step in flight.

        A schedule without chunks only fetches the result of `before`.
        """
        return schedule

    def submitted(self, schedule: Schedule) -> None:
        """Record which sequences own the tokens of a step, before its rows can change owners.

        It is called once all start positions of the step are known.
        """

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Process the result of a step before it is committed.

        `counts` bool [S] marks the samples that become tokens; None: all do.
        """

    def committed(self, schedule: Schedule, num_tokens: int) -> None:
        """Record that a step was committed with this number of new tokens."""

    def released(self, sequence: Sequence) -> None:
        """Finish an ended sequence, which still has its pages."""

    def reset(self, cause: Reset) -> None:
        """Reset for a `cause`."""

    def statistics(self) -> dict[str, float]:
        """Return totals by field name."""
        return {}


Extension = TypeVar("Extension", bound=StepExtension)


def hooks(extensions: Iterable[StepExtension], name: str) -> tuple[Any, ...]:
    """Return the bound methods `name` of the extensions that override it, in their order."""
    inherited = getattr(StepExtension, name)
    return tuple(getattr(each, name) for each in extensions if getattr(type(each), name) is not inherited)


def extension_of(extensions: Iterable[StepExtension], kind: type[Extension]) -> Extension | None:
    """Return the extension of this class, or None without one."""
    return next((each for each in extensions if isinstance(each, kind)), None)
