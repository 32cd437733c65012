"""Totals over the steps of an engine: seconds, tokens, and assignments to expert slots of limited capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.engine.extension import StepExtension
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.step_plan import StepResult


@dataclass
class StepClock:
    """Seconds by phase of all steps so far, and their numbers of tokens."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    schedule_s: float = 0.0
    pack_s: float = 0.0
    transport_s: float = 0.0
    device_s: float = 0.0
    commit_s: float = 0.0

    def record(self, finished: Schedule, result: StepResult, *, num_sampled: int, commit_s: float) -> None:
        """Add a committed step."""
        self.steps += 1
        self.tokens_computed += finished.plan.num_tokens
        self.tokens_sampled += num_sampled if finished.plan.chunks.max_drafts else len(finished.sampling_rows)
        self.pack_s += result.pack_s
        self.device_s += result.device_s
        self.transport_s -= result.pack_s + result.device_s
        self.commit_s += commit_s


def scheduler_statistics(scheduler: Scheduler) -> dict[str, float]:
    """Return pages of all data ranks, and running sequences, as of now."""
    ranks, running = scheduler.open_ranks, scheduler.running
    num_arriving = sum(len(rank.host.arriving) for rank in ranks if rank.host is not None)
    return {
        "pages_total": float(sum(rank.allocator.num_usable for rank in ranks)),
        "pages_free": float(sum(rank.num_available for rank in ranks) + num_arriving),
        "pages_cached": float(sum(rank.tree.num_cached_pages for rank in ranks)),
        "requests_running": float(len(running)),
        "tokens_in_use": float(sum(sequence.num_computed for sequence in running)),
        "preemptions": float(scheduler.num_preemptions),
    }


class SelectionTally(StepExtension):
    """Sum of the tallies of all steps, for servers whose expert slots have limited capacity."""

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._tally: np.ndarray | None = None

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Add the tally of a step."""
        if result.tally is not None:
            self._tally = result.tally if self._tally is None else self._tally + result.tally

    def statistics(self) -> dict[str, float]:
        """Return `selection_statistics` of all steps."""
        return selection_statistics(self._tally, num_ranks=self._migration.placement.ep_size)


def selection_statistics(tally: np.ndarray | None, *, num_ranks: int) -> dict[str, float]:
    """Return the effect of slot capacities on expert assignments (`StepResult.tally`); empty without limits.

    `rank_imbalance` is the load of the busiest rank of each layer and step over the mean, weighted by assignments.
    """
    if tally is None:
        return {}
    wanted, kept, filled, hottest = map(float, tally)
    return {
        "picks_kept_share": kept / wanted if wanted else 1.0,
        "picks_rerouted": filled - kept,
        "picks_unfilled": wanted - filled,
        "rank_imbalance": hottest * num_ranks / filled if filled else 1.0,
    }
