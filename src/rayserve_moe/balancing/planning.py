"""Planning for one engine: proposes a placement where a better one is worth its moves."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading, LoadWindow
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.proposal import PlacementState, Proposal
from rayserve_moe.config.settings import BalancingSettings, ExpertSettings

LEAST_GAIN = 0.01
"""By how much the hottest rank, as a part of the mean one, must fall for moves to be worth it; a mean over layers."""
TOLERANCE = 0.02
"""How far above its bound a layer's hottest rank may be."""
SURE = 3.0
"""Deviations of chance that a gain has to exceed."""
LEAST_TOKENS_PER_EXPERT = 32


@dataclass(frozen=True)
class PlanningConfig:
    """How a server is balanced: steps between two plans, steps that count, and how tokens choose among slots."""

    interval: int
    window: int
    dispatch: str = "shares"


class LocalPlanner:
    """A `Planner` in the calling process; not thread-safe."""

    def __init__(self, config: PlanningConfig) -> None:
        self._config, self._window = config, LoadWindow(config.window)
        self._generation, self._step, self._planned_at = 0, 0, 0

    def observe(self, reading: LoadReading) -> bool:
        """Take over a reading; says whether it is time for a plan and enough was counted."""
        if reading.generation != self._generation or reading.step < self._step:
            self._generation, self._planned_at = reading.generation, reading.step
        self._step = reading.step
        self._window.add(reading)
        return self._step - self._planned_at >= self._config.interval and has_enough(self._window.totals())

    def propose(self, state: PlacementState) -> Proposal | None:
        """Plan from the window; None where it is of other counts, or no better placement is worth its moves."""
        started = time.perf_counter()
        tokens, now, dispatch = self._window.totals(), state.placement, self._config.dispatch
        self._planned_at = self._step
        if state.generation != self._generation or tokens.shape != (now.num_layers, now.num_experts):
            return None
        before = imbalance(rank_loads(now, tokens, dispatch=dispatch))
        noise = chance(tokens, ep_size=now.ep_size)
        if not is_worth(before, np.ones_like(before), noise=noise):
            return None
        wanted = plan(
            tokens,
            ep_size=now.ep_size,
            num_redundant=now.num_redundant,
            previous=now,
            tolerance=max(TOLERANCE, noise),
        )
        after = imbalance(rank_loads(wanted, tokens, dispatch=dispatch))
        if not is_worth(before, after, noise=noise):
            return None
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


def planning_config(balancing: BalancingSettings, experts: ExpertSettings) -> PlanningConfig:
    """What the settings say about planning."""
    dispatch = "first" if experts.selection == "topk" else experts.dispatch
    return PlanningConfig(balancing.interval, balancing.window, dispatch)


def has_enough(tokens: np.ndarray) -> bool:
    """Whether there are tokens enough [layers, experts] in every layer to make a plan from."""
    return tokens.size > 0 and bool(tokens.sum(axis=1).min() >= LEAST_TOKENS_PER_EXPERT * tokens.shape[1])


def rank_loads(placement: ExpertPlacement, tokens: np.ndarray, *, dispatch: str = "shares") -> np.ndarray:
    """Tokens that each rank computes of `tokens` [layers, experts] under a dispatch: float64 [layers, ranks].

    `static` assumes that all ranks send equally many tokens. `capacity` is treated as `shares`, which it equals where
    slots fill up; its preference for near slots before that does not follow from loads.
    """
    fractions = _slot_fractions(placement, dispatch)
    loads = fractions * np.take_along_axis(tokens, placement.expert_of_slot, axis=1)
    return loads.reshape(placement.num_layers, placement.ep_size, -1).sum(axis=2)


def imbalance(loads: np.ndarray) -> np.ndarray:
    """Load of the hottest rank over the mean, by layer, of loads [layers, ranks]; 1 where there is none."""
    means = loads.mean(axis=1)
    return np.where(means > 0, loads.max(axis=1) / np.where(means > 0, means, 1), 1.0)


def chance(tokens: np.ndarray, *, ep_size: int) -> float:
    """How far a rank's load is off its mean by chance alone, as a part of it, with so many tokens: one deviation."""
    per_rank = tokens.sum(axis=1).mean() / ep_size
    return float(1 / np.sqrt(max(per_rank, 1.0)))


def is_worth(before: np.ndarray, after: np.ndarray, *, noise: float) -> bool:
    """Whether imbalances [layers] fall by more than moves cost, and by more than chance makes it look like."""
    return bool((before - after).mean() >= max(LEAST_GAIN, SURE * noise))


def _slot_fractions(placement: ExpertPlacement, dispatch: str) -> np.ndarray:
    """The part of its expert's tokens that each slot gets: [layers, slots]."""
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
