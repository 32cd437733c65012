"""The interface of a planner, and the checks of its proposals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, placement_from


@dataclass(frozen=True, eq=False)
class PlacementState:
    """What a plan is made from: the placement in force, its version, and the generation of the counts."""

    generation: int
    version: int
    placement: ExpertPlacement


@dataclass(frozen=True, eq=False)
class Proposal:
    """A placement to head for, as bare arrays, nothing of it checked.

    It would become `version`; it was made from version `made_from` and counts of `generation`. `imbalance_before` and
    `_after` are the hottest rank over the mean one, averaged over layers.
    """

    version: int
    made_from: int
    generation: int
    expert_of_slot: np.ndarray
    share_of_slot: np.ndarray
    imbalance_before: float
    imbalance_after: float
    plan_seconds: float


class PlanFailure(RuntimeError):
    """No plan can be made now. `reason` is `lost` (no planner), `late` (timeout) or `failed`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class RefusedPlanError(ValueError):
    """A plan that must not be followed. `reason` is `malformed`, `invalid` or `stale`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Planner(Protocol):
    """Plans for one engine. Raises PlanFailure where it cannot; the caller may retry later."""

    def observe(self, reading: LoadReading) -> bool:
        """Take over a reading; returns whether `propose` should be asked."""
        ...

    def propose(self, state: PlacementState) -> Proposal | None:
        """Plan from what was observed; None where nothing is to be changed."""
        ...


def checked_placement(proposal: Any, state: PlacementState) -> ExpertPlacement:
    """The placement of a proposal that fits `state`, the state of things now. RefusedPlanError where it does not."""
    if not isinstance(proposal, Proposal):
        raise RefusedPlanError("malformed", "what came is no proposal")
    numbers = (proposal.version, proposal.made_from, proposal.generation)
    if any(type(number) is not int for number in numbers):
        raise RefusedPlanError("malformed", "versions are not whole numbers")
    if (proposal.made_from, proposal.generation) != (
        state.version,
        state.generation,
    ) or proposal.version <= state.version:
        raise RefusedPlanError("stale", "the plan was made from another placement, or from counts of other weights")
    measures = (proposal.imbalance_before, proposal.imbalance_after, proposal.plan_seconds)
    if not all(isinstance(value, float) and np.isfinite(value) for value in measures):
        raise RefusedPlanError("malformed", "an imbalance or a time is not a number")
    now, shape = state.placement, state.placement.expert_of_slot.shape
    for array, kinds in ((proposal.expert_of_slot, "iu"), (proposal.share_of_slot, "f")):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.shape != shape:
            raise RefusedPlanError("malformed", "experts or shares are not numbers of the layers and slots there are")
    try:
        # Copies: the arrays may lie in memory of the sender.
        experts, shares = proposal.expert_of_slot.copy(), proposal.share_of_slot.copy()
        return placement_from(experts, shares, num_experts=now.num_experts, ep_size=now.ep_size)
    except PlacementError as error:
        raise RefusedPlanError("invalid", str(error)) from error
