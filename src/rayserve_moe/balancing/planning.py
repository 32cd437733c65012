"""Planning for an engine: the interface, a planner that proposes worthwhile placements, and checks of proposals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rayserve_moe.balancing.coactivation import RATES, cheapest, improvements
from rayserve_moe.balancing.load_window import LoadReading, LoadWindow
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, placement_from
from rayserve_moe.balancing.planner import plan, replan
from rayserve_moe.balancing.traffic import CostRates, traffic_of
from rayserve_moe.config.settings import BalancingSettings, ExpertSettings

MIN_GAIN = 0.01
"""Minimum decrease of the hottest rank's load, relative to the mean rank, for moves to be worthwhile; mean over layers.
"""
TOLERANCE = 0.02
"""Maximum of a layer's hottest rank above its bound, relative."""
SURE = 3.0
"""Standard deviations of chance that a gain must exceed."""
MIN_TOKENS_PER_EXPERT = 32
MIN_ROWS = 256
"""Minimum sample of routing for a plan that looks at the experts of a token together."""
MIN_TIME_GAIN = 0.03
"""Minimum decrease of a layer's estimated time for such a plan."""


@dataclass(frozen=True)
class PlanningConfig:
    """Planning options of a server."""

    interval: int
    """Steps between two plans."""
    window: int
    """Steps that count."""
    dispatch: str = "shares"
    """Selection among an expert's slots by tokens."""


class LocalPlanner:
    """A `Planner` in the calling process; not thread-safe."""

    def __init__(self, config: PlanningConfig) -> None:
        self._config, self._window = config, LoadWindow(config.window)
        self._generation, self._step, self._planned_at = 0, 0, 0

    def observe(self, reading: LoadReading) -> bool:
        """Record a reading; return True if a plan is due and enough tokens were counted."""
        if reading.generation != self._generation or reading.step < self._step:
            self._generation, self._planned_at = reading.generation, reading.step
        self._step = reading.step
        self._window.add(reading)
        return self._step - self._planned_at >= self._config.interval and has_enough(self._window.totals())

    def propose(self, state: PlacementState) -> Proposal | None:
        """Plan from the window. Return None if it has other counts, or no better placement is worth its moves."""
        started = time.perf_counter()
        tokens, now, dispatch = self._window.totals(), state.placement, self._config.dispatch
        self._planned_at = self._step
        if state.generation != self._generation or tokens.shape != (now.num_layers, now.num_experts):
            return None
        before = imbalance(rank_loads(now, tokens, dispatch=dispatch))
        wanted = self._balanced(now, tokens, num_slices=state.num_slices)
        if dispatch == "shares":
            wanted = cheaper_for_rows(wanted, state, load=tokens)
        if wanted is now:
            return None
        after = imbalance(rank_loads(wanted, tokens, dispatch=dispatch))
        return Proposal(
            state.version + 1,
            state.version,
            state.generation,
            wanted.expert_of_slot,
            wanted.share_of_slot,
            float(before.mean()),
            float(after.mean()),
            time.perf_counter() - started,
        )

    def _balanced(self, now: ExpertPlacement, tokens: np.ndarray, *, num_slices: int) -> ExpertPlacement:
        """Return the placement that balances `tokens`, or `now` if none is worth its moves."""
        noise, dispatch = chance(tokens, ep_size=now.ep_size), self._config.dispatch
        before = imbalance(rank_loads(now, tokens, dispatch=dispatch))
        if not is_worth(before, np.ones_like(before), noise=noise):
            return now
        wanted = replan(tokens, now, tolerance=max(TOLERANCE, noise), num_slices=num_slices)
        after = imbalance(rank_loads(wanted, tokens, dispatch=dispatch))
        return wanted if is_worth(before, after, noise=noise) else now


def cheaper_for_rows(
    placement: ExpertPlacement, state: PlacementState, *, load: np.ndarray, rates: CostRates = RATES
) -> ExpertPlacement:
    """Return a placement with less estimated time for the state's rows than `placement`, or `placement` itself.

    It has to save `MIN_TIME_GAIN`, because it moves many experts.
    """
    if len(state.rows) < MIN_ROWS or placement.slots_per_rank >= placement.num_experts or placement.ep_size == 1:
        return placement
    slices = state.num_slices
    # A higher limit would give up balance that the next plan from counts would restore.
    limits = (1 + TOLERANCE,)
    tried = [placement, *improvements(placement, load, rows=state.rows, num_slices=slices, limits=limits)]
    found = cheapest(tried, state.rows, batch=state.batch, num_slices=slices, rates=rates)
    shown = state.rows[-max(MIN_ROWS, state.batch) :]
    seconds = [
        traffic_of(each, shown, batch=state.batch, num_slices=slices)
        .seconds(rates, batch=state.batch, num_ranks=placement.ep_size)
        .sum()
        for each in (placement, found)
    ]
    return found if seconds[1] < (1 - MIN_TIME_GAIN) * seconds[0] else placement


def carried_placement(
    before: ExpertPlacement, tokens: np.ndarray, *, former_ranks: Sequence[int | None], num_redundant: int
) -> ExpertPlacement:
    """Return a placement for other ranks that balances `tokens` [layers, experts] and moves few experts.

    A rank holds the experts of the rank of `before` that `former_ranks` gives for it, None for a rank without any.
    Too few tokens count as equally many for each expert.
    """
    loads = tokens if has_enough(tokens) else np.ones((before.num_layers, before.num_experts))
    num_ranks = len(former_ranks)
    order = sorted(range(num_ranks), key=lambda rank: former_ranks[rank] is None)
    staying = [former for rank in order if (former := former_ranks[rank]) is not None]
    others = [rank for rank in range(before.ep_size) if rank not in staying]
    planned = plan(
        loads,
        ep_size=num_ranks,
        num_redundant=num_redundant,
        previous=_reordered(before, [*staying, *others]),
        tolerance=max(TOLERANCE, chance(loads, ep_size=num_ranks)),
    )
    return _reordered(planned, np.argsort(order).tolist())


def _reordered(placement: ExpertPlacement, ranks: Sequence[int]) -> ExpertPlacement:
    """Return the placement whose rank i is rank `ranks[i]` of another."""
    experts, shares = (
        each.reshape(placement.num_layers, placement.ep_size, -1)[:, ranks].reshape(placement.num_layers, -1)
        for each in (placement.expert_of_slot, placement.share_of_slot)
    )
    return placement_from(experts, shares, num_experts=placement.num_experts, ep_size=placement.ep_size)


def planning_config(balancing: BalancingSettings, experts: ExpertSettings) -> PlanningConfig:
    """Return the planning options of the settings."""
    dispatch = "first" if experts.selection == "topk" else experts.dispatch
    return PlanningConfig(balancing.interval, balancing.window, dispatch)


def has_enough(tokens: np.ndarray) -> bool:
    """Return True if every layer of `tokens` [layers, experts] has enough tokens to plan from."""
    return tokens.size > 0 and bool(tokens.sum(axis=1).min() >= MIN_TOKENS_PER_EXPERT * tokens.shape[1])


def rank_loads(placement: ExpertPlacement, tokens: np.ndarray, *, dispatch: str = "shares") -> np.ndarray:
    """Return the tokens that each rank computes of `tokens` [layers, experts] under a dispatch: float64 [layers,
    ranks].

    `static` assumes that all ranks send equally many tokens. `capacity` is treated as `shares`: both are equal once
    slots are full, and its preference for near slots before that does not follow from loads.
    """
    fractions = _slot_fractions(placement, dispatch)
    loads = fractions * np.take_along_axis(tokens, placement.expert_of_slot, axis=1)
    return loads.reshape(placement.num_layers, placement.ep_size, -1).sum(axis=2)


def imbalance(loads: np.ndarray) -> np.ndarray:
    """Return the hottest rank's load over the mean by layer, from loads [layers, ranks]; 1 without load."""
    means = loads.mean(axis=1)
    return np.where(means > 0, loads.max(axis=1) / np.where(means > 0, means, 1), 1.0)


def chance(tokens: np.ndarray, *, ep_size: int) -> float:
    """Return the standard deviation of a rank's load by chance alone, relative to its mean."""
    per_rank = tokens.sum(axis=1).mean() / ep_size
    return float(1 / np.sqrt(max(per_rank, 1.0)))


def is_worth(before: np.ndarray, after: np.ndarray, *, noise: float) -> bool:
    """Return True if imbalances [layers] fall by more than moves cost and chance explains."""
    return bool((before - after).mean() >= max(MIN_GAIN, SURE * noise))


def _slot_fractions(placement: ExpertPlacement, dispatch: str) -> np.ndarray:
    """Return each slot's part of its expert's tokens: [layers, slots]."""
    if dispatch in ("shares", "capacity"):
        return placement.share_of_slot.astype(np.float64)
    fractions = np.zeros(placement.expert_of_slot.shape)
    layers = np.arange(placement.num_layers)[:, None]
    if dispatch == "first":
        order = np.argsort(placement.expert_of_slot, axis=1, kind="stable")
        experts = np.take_along_axis(placement.expert_of_slot, order, axis=1)
        is_first = np.diff(experts, axis=1, prepend=-1) != 0
        fractions[layers, order] = is_first
        return fractions
    np.add.at(fractions, (layers[..., None], placement.slot_for), 1 / placement.ep_size)
    return fractions


@dataclass(frozen=True, eq=False)
class PlacementState:
    """The input of a plan."""

    generation: int
    """Generation of the counts."""
    version: int
    """Version of the placement."""
    placement: ExpertPlacement
    """The current placement."""
    num_slices: int = 1
    """Slices that the ranks are divided over."""
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    """Experts of a sample of tokens, [tokens, layers, k]; none if the server captures no routing."""
    batch: int = 1
    """Tokens of a step over all ranks, on average."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A proposed placement, as unchecked arrays."""

    version: int
    """Version of this placement if it is accepted."""
    made_from: int
    """Version of the placement from which it was planned."""
    generation: int
    """Generation of the counts from which it was planned."""
    expert_of_slot: np.ndarray
    share_of_slot: np.ndarray
    imbalance_before: float
    """Hottest rank over the mean rank, averaged over layers."""
    imbalance_after: float
    """Hottest rank over the mean rank, averaged over layers."""
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
    """Plans for an engine. Raises PlanFailure if it cannot; the caller may retry later."""

    def observe(self, reading: LoadReading) -> bool:
        """Record a reading; return True if `propose` should be called."""
        ...

    def propose(self, state: PlacementState) -> Proposal | None:
        """Plan from the observed readings; return None if nothing should change."""
        ...


def checked_placement(proposal: Any, state: PlacementState) -> ExpertPlacement:
    """Return the placement of a proposal that fits the current `state`. Raises RefusedPlanError if it does not fit."""
    if not isinstance(proposal, Proposal):
        raise RefusedPlanError("malformed", "the object is not a Proposal")
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
            raise RefusedPlanError("malformed", "experts or shares are not numbers of the current layers and slots")
    try:
        # Copy, because the arrays may be in the sender's memory.
        experts, shares = proposal.expert_of_slot.copy(), proposal.share_of_slot.copy()
        return placement_from(experts, shares, num_experts=now.num_experts, ep_size=now.ep_size)
    except PlacementError as error:
        raise RefusedPlanError("invalid", str(error)) from error
