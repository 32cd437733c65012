"""The engine's side of expert balancing: which piece of a migration a step takes along, and what was counted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.migration import Migration, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.proposal import PlacementState
from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.requests import RoutingLayout
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import StartReport, StepResult

log = logging.getLogger(__name__)

COUNTS_EVERY = 16
"""Steps from one reading of the devices' counts to the next."""


def eplb_steps_for(
    layout: RoutingLayout, report: StartReport, *, settings: BalancingSettings, num_hosts: int
) -> EplbSteps | None:
    """The balancing of a server that has just started, all experts in their own order; None where it is off."""
    if not settings.enabled:
        return None
    placement = identity_placement(
        len(layout.layer_ids),
        layout.num_experts,
        ep_size=report.num_expert_ranks,
        num_redundant=report.num_redundant_experts,
    )
    return EplbSteps(Migration(placement, hosts=num_hosts, slots_per_step=settings.slots_per_step))


class EplbSteps:
    """Hands the pieces of `migration` to steps, at most one each, and keeps what they tell of expert loads.

    The plan of a step carries its piece, so that every host runs the same one with the same step. `reading` is the
    last one of the counts, and `has_news` is set when there is another. `head_for`, `state`, and what is read of
    `migration.progress` and of counts may come from any thread, all else from that of the engine.
    """

    def __init__(self, migration: Migration, *, counts_every: int = COUNTS_EVERY) -> None:
        self.migration = migration
        start = migration.placement
        self.reading = LoadReading(0, 0, np.zeros((start.num_layers, start.num_experts), np.int32))
        self.has_news = threading.Event()
        self._wanted: deque[ExpertPlacement] = deque(maxlen=1)
        self._counts_every, self._num_steps = counts_every, 0
        self._steps_with_pieces = set[int]()
        self._is_held = False

    def state(self) -> PlacementState | None:
        """What a plan may be made from now; None while a migration is under way or asked for."""
        progress = self.migration.progress
        if self._wanted or not progress.is_done:
            return None
        return PlacementState(self.reading.generation, progress.version, self.migration.placement)

    def forget_counts(self) -> None:
        """Have counts that follow not be compared with those before: after a change of weights, or of counting."""
        self.reading = replace(self.reading, generation=self.reading.generation + 1, step=self._num_steps)
        self.has_news.set()

    def head_for(self, placement: ExpertPlacement) -> None:
        """Have the next steps bring experts to `placement`, whatever was under way or asked for before.

        PlacementError where it is of other layers, slots or ranks; then nothing changes.
        """
        self.migration.check(placement)
        self._wanted.append(placement)

    def hold(self) -> ExpertPlacement:
        """Have experts stay where they are until `go_on`; returns where that is. Call while no step is under way."""
        self._is_held = True
        return self.migration.placement

    def go_on(self) -> None:
        """Let experts move again."""
        self._is_held = False

    def change_weights(self) -> None:
        """Begin anew what is under way, and what is counted: all that was fetched or counted is of other weights."""
        if not self.migration.progress.is_done:
            self.migration.begin(self.migration.target)
        self.forget_counts()

    def attach(self, schedule: Schedule) -> Schedule:
        """Give a step that computes something the next piece, and every few of them the question for counts."""
        if not schedule.plan.num_chunks:
            return schedule
        self._num_steps += 1
        piece, wants_counts = self._next_piece(), self._num_steps % self._counts_every == 0
        if piece is None and not wants_counts:
            return schedule
        if piece is not None:
            self._steps_with_pieces.add(schedule.plan.step_id)
        return replace(schedule, plan=replace(schedule.plan, migration=piece, wants_expert_counts=wants_counts))

    def absorb(self, result: StepResult) -> None:
        """Take over what a step tells: counts, if any, and whether experts could be fetched."""
        self._steps_with_pieces.discard(result.step_id)
        if result.failed_fetch is not None and result.failed_fetch.version > self.migration.given_up_version:
            log.error("experts could not be fetched: those of layers from %d on stay", result.failed_fetch.layer)
            self.migration.give_up(result.failed_fetch)
        if result.expert_counts is not None:
            self.reading = LoadReading(self.reading.generation, self._num_steps, result.expert_counts)
            self.has_news.set()

    def _next_piece(self) -> MigrationPiece | None:
        """The next piece; another migration begins once it is known what came of all pieces of the one before."""
        if self._is_held:
            return None
        if not self._wanted:
            return self.migration.next_piece()
        if self._steps_with_pieces:
            return None
        self.migration.begin(self._wanted.pop())
        return self.migration.next_piece()
