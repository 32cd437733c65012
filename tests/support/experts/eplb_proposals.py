"""Plans and what spoils them, and steps without a model that carry pieces of migrations and count tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe.balancing.migration import FailedFetch, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planning import PlacementState, Proposal
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan, StepResult
from tests.support.experts.placements import random_placement
from tests.support.models.core import CORE_CONFIG

NOTHING = np.zeros(0, np.int32)
SKEWED_CONFIG = replace(CORE_CONFIG, drawn=replace(CORE_CONFIG.drawn, router_skew=1.0))
"""The core model, with experts that are chosen far more than others."""
SUMMED_CONFIG = replace(SKEWED_CONFIG, num_experts_per_tok=4)
"""The same with four experts per token, because a sum of two has no order."""
SPREAD_SETTINGS = {
    "devices_per_host": 4,
    "num_redundant_experts": 4,
    "max_running_requests": 8,
    "precompile_bs_paddings": [8],
    "max_step_tokens": 64,
    "num_pages": 128,
    "enable_return_routed_experts": True,
    "structured_output": False,
}
"""Of engines whose experts lie on several devices: one compilation serves all tests that take them."""
EPLB_SETTINGS = {"enable_eplb": True, "eplb_interval": 16, "eplb_window": 400}


def proposal_for(state: PlacementState, seed: int) -> Proposal:
    """A plan from `state` to some other placement."""
    placement = random_placement(state.placement, seed)
    return Proposal(
        state.version + 1,
        state.version,
        state.generation,
        placement.expert_of_slot,
        placement.share_of_slot,
        imbalance_before=2.0,
        imbalance_after=1.0,
        plan_seconds=0.1,
    )


def _with_twice_on_a_rank(proposal: Proposal) -> Proposal:
    experts = proposal.expert_of_slot.copy()
    experts[0, 0] = experts[0, 1]
    return replace(proposal, expert_of_slot=experts)


def _with_a_share_of(value: float) -> Callable[[Proposal], Proposal]:
    def spoil(proposal: Proposal) -> Proposal:
        shares = proposal.share_of_slot.copy()
        shares[-1, 0] = value
        return replace(proposal, share_of_slot=shares)

    return spoil


GARBAGE: dict[str, tuple[Callable[[Proposal], Any], str]] = {
    "something else": (lambda _: {"expert_of_slot": [[0]]}, "malformed"),
    "other layers": (lambda p: replace(p, expert_of_slot=p.expert_of_slot[:1]), "malformed"),
    "other slots": (lambda p: replace(p, share_of_slot=p.share_of_slot[:, :-1]), "malformed"),
    "experts that are fractions": (lambda p: replace(p, expert_of_slot=p.expert_of_slot + 0.5), "malformed"),
    "experts in a list": (lambda p: replace(p, expert_of_slot=p.expert_of_slot.tolist()), "malformed"),
    "a version that is no number": (lambda p: replace(p, version="8"), "malformed"),
    "an imbalance that is no number": (lambda p: replace(p, imbalance_after=float("nan")), "malformed"),
    "an expert twice on a rank": (_with_twice_on_a_rank, "invalid"),
    "an expert that is not there": (lambda p: replace(p, expert_of_slot=p.expert_of_slot + 1), "invalid"),
    "an expert without a slot": (lambda p: replace(p, expert_of_slot=np.zeros_like(p.expert_of_slot)), "invalid"),
    "a share that is no number": (_with_a_share_of(float("nan")), "invalid"),
    "shares beyond the whole": (_with_a_share_of(3.0), "invalid"),
    "an old version": (lambda p: replace(p, version=p.made_from), "stale"),
    "made from another placement": (lambda p: replace(p, version=p.version + 5, made_from=p.made_from + 5), "stale"),
    "made from counts of other weights": (lambda p: replace(p, generation=p.generation + 1), "stale"),
}
"""What spoils a plan, and the reason with which it is to be refused."""


class CountedSteps:
    """Runs steps that overlap, as an engine does, on slots that hold numbers of experts instead of weights.

    Tokens are drawn by `odds` [layers, experts]. From fetch number `fails_at` on the migration under way fails.
    """

    def __init__(self, eplb: EplbSteps, odds: np.ndarray, *, tokens_per_step: int = 2000) -> None:
        self._eplb, self._generator = eplb, np.random.default_rng(0)
        self._odds, self._tokens = odds / odds.sum(axis=1, keepdims=True), tokens_per_step
        self._counts = np.zeros(odds.shape, np.int64)
        start = eplb.migration.placement
        self.experts, self.shares = start.expert_of_slot.copy(), start.share_of_slot.copy()
        self._staging: dict[tuple[int, int], int] = {}
        self._in_flight: StepResult | None = None
        self._failed: FailedFetch | None = None
        self.num_steps, self.num_fetches, self.fails_at = 0, 0, float("inf")

    def shift_odds(self) -> None:
        """Have other experts be the hot ones from now on."""
        self._odds = np.roll(self._odds, self._odds.shape[1] // 2, axis=1)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            one = np.ones(1, np.int32)
            plan = StepPlan(self.num_steps, Chunks(one, one, one, one, one.astype(bool)))
            schedule = self._eplb.plan(Schedule(plan, NOTHING, NOTHING, 0), None)
            before, self._in_flight = self._in_flight, self._compute(schedule.plan)
            if before is not None:
                self._eplb.returned(schedule, before, counts=None)

    @property
    def failed_version(self) -> int:
        return 0 if self._failed is None else self._failed.version

    def assert_hold(self, placement: ExpertPlacement) -> None:
        np.testing.assert_array_equal(self.experts, placement.expert_of_slot)
        np.testing.assert_array_equal(self.shares, placement.share_of_slot)

    def _compute(self, plan: StepPlan) -> StepResult:
        if plan.migration is not None:
            self._move(plan.migration)
        for layer, odds in enumerate(self._odds):
            self._counts[layer] += self._generator.multinomial(self._tokens, odds)
        counts = self._counts.astype(np.int32) if plan.wants_expert_counts else None
        return StepResult(plan.step_id, NOTHING, NOTHING, NOTHING, expert_counts=counts, failed_fetch=self._failed)

    def _move(self, piece: MigrationPiece) -> None:
        if self._failed is not None and self._failed.version == piece.version:
            return
        self._failed = None
        if piece.fetch is not None:
            self.num_fetches += 1
            if self.num_fetches >= self.fails_at:
                self.fails_at, self._failed = float("inf"), FailedFetch(piece.version, piece.fetch.layer)
                return
            for rank, (sources, places) in enumerate(zip(piece.fetch.sources, piece.fetch.places, strict=True)):
                for source, place in zip(sources[sources >= 0], places[sources >= 0], strict=True):
                    self._staging[rank, int(place)] = self.experts[piece.fetch.layer, source]
        if piece.swap is not None:
            layer, slots_per_rank = piece.swap.layer, piece.swap.placement.slots_per_rank
            for slot in np.flatnonzero(piece.swap.is_moved):
                self.experts[layer, slot] = self._staging[divmod(int(slot), slots_per_rank)]
            self.shares[layer] = piece.swap.placement.share_of_slot[0]
