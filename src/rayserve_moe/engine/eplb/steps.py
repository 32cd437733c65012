"""Expert balancing in the step cycle: steps carry pieces of a migration and return expert counts."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.migration import Migration, MigrationPiece, check_alike
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementConflictError, PlacementError, identity_placement
from rayserve_moe.balancing.placement_file import read_placement
from rayserve_moe.balancing.planning import PlacementState, carried_placement
from rayserve_moe.config.settings import BalancingSettings, ParallelSettings, SettingsError
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.engine.extension import NewWeights, ReplacedHosts, Reset, StepExtension
from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import StartReport, StepResult

log = logging.getLogger(__name__)

COUNTS_EVERY = 16
"""Steps between two readings of the devices' expert counts."""
COUNTS_EVERY_UNPLANNED = 64
"""The same for servers whose experts never move. Readings are only displayed there, and each costs a small launch."""
SAMPLED_STEPS, ROWS_PER_STEP = 64, 64
"""Steps and rows per step of captured routing that are kept."""


def eplb_steps_for(
    layout: RoutingLayout, report: StartReport, *, settings: BalancingSettings, parallel: ParallelSettings
) -> EplbSteps:
    """Return the extension for a server that has just started."""
    own_order = identity_placement(
        len(layout.layer_ids),
        layout.num_experts,
        ep_size=report.num_expert_ranks,
        num_redundant=report.num_redundant_experts,
    )
    hosts, slices, first = parallel.num_hosts, parallel.num_slices, report.placement or own_order
    migration = Migration(first, hosts=hosts, slices=slices, slots_per_step=settings.slots_per_step)
    if settings.enabled:
        steps = EplbSteps(migration, own_order=own_order)
        if settings.placement:
            steps.set_target(_configured(settings.placement, first))
        return steps
    return EplbSteps(migration, own_order=own_order, counts_every=COUNTS_EVERY_UNPLANNED, moves_experts=False)


def _configured(file: str, first: ExpertPlacement) -> ExpertPlacement:
    """Return the placement of the settings. Raises SettingsError if it does not fit the group."""
    try:
        placement = read_placement(file)
        check_alike(first, placement)
    except PlacementError as error:
        raise SettingsError(f"expert_placement: {error}") from error
    return placement


class EplbSteps(StepExtension):
    """Extension that adds pieces of `migration` to step plans, at most one per step, and reads expert counts.

    A piece travels in the plan of its step, so that every host runs it in the same step. `set_target`, `order`,
    `state`, `reading` and `migration.progress` may be used from any thread, all else only from the engine thread.
    """

    def __init__(
        self,
        migration: Migration,
        *,
        own_order: ExpertPlacement | None = None,
        counts_every: int = COUNTS_EVERY,
        moves_experts: bool = True,
    ) -> None:
        self.migration, self.moves_experts = migration, moves_experts
        start = migration.placement
        self.reading = LoadReading(0, 0, np.zeros((start.num_layers, start.num_experts), np.int32))
        """The latest expert counts."""
        self.on_reading: Callable[[], object] = _ignore
        """Called in the engine thread after every reading."""
        self.peak_rows = np.ones(start.num_layers)
        """Rows of the hottest expert over the mean between the last two readings, float64 [layers]."""
        self._rows: tuple[tuple[np.ndarray, int], ...] = ()  # replaced as a whole, for readers from other threads
        self._wanted: deque[ExpertPlacement] = deque(maxlen=1)
        self._ordered: ExpertPlacement | None = None
        self._target_lock = threading.Lock()
        """Held while a target is requested or begins."""
        self.counts_every, self._num_steps = counts_every, 0
        self._steps_with_pieces = set[int]()
        self._is_held = False
        self.first = start
        """Placement of hosts that start now."""
        self._own_order = own_order or start
        """Placement of experts that hosts read from a checkpoint."""

    def state(self) -> PlacementState | None:
        """Return the input for planning now, or None while a migration runs or is requested."""
        progress = self.migration.progress
        if self._wanted or not progress.is_done:
            return None
        migration = self.migration
        return PlacementState(self.reading.generation, progress.version, migration.placement, migration.num_slices)

    def sampled_rows(self) -> tuple[np.ndarray, int]:
        """Return rows of the last counted steps [tokens, layers, k], none without captured routing, and the mean number
        of tokens of these steps.
        """
        kept = self._rows
        if not kept:
            return np.zeros((0, self.migration.placement.num_layers, 1), np.uint8), 1
        num_tokens = sum(number for _, number in kept)
        return np.concatenate([rows for rows, _ in kept]), max(1, round(num_tokens / len(kept)))

    def forget_counts(self) -> None:
        """Begin a new generation of counts, after a change of weights or of counting."""
        self._rows = ()
        self.reading = replace(self.reading, generation=self.reading.generation + 1, step=self._num_steps)
        self.on_reading()

    def set_target(self, placement: ExpertPlacement) -> None:
        """Move experts to `placement` in the next steps, replacing a running or requested migration of a plan.

        Raises: PlacementError if layers, slots or ranks differ, PlacementConflictError if experts are still moving to
        an ordered placement; then nothing changes.
        """
        self.migration.check(placement)
        with self._target_lock:
            if self._moves_to_ordered():
                raise PlacementConflictError(self._conflict())
            self._wanted.append(placement)

    def order(self, placement: ExpertPlacement) -> int:
        """Call `set_target` with a placement that no other target replaces; return the version that it gets.

        A placement that is ordered twice moves experts once.
        """
        self.migration.check(placement)
        with self._target_lock:
            pending = self._ordered if self._moves_to_ordered() else None
            if pending is None:
                self._ordered = placement
                self._wanted.append(placement)
            elif not _is_same(pending, placement):
                raise PlacementConflictError(self._conflict())
            return self.migration.progress.version + len(self._wanted)

    def _moves_to_ordered(self) -> bool:
        """Return True if the ordered placement is requested, or its migration runs."""
        migration = self.migration
        target = self._wanted[0] if self._wanted else None if migration.progress.is_done else migration.target
        return target is not None and target is self._ordered

    def _conflict(self) -> str:
        progress = self.migration.progress
        version, begun = progress.version + len(self._wanted), 0 if self._wanted else progress.num_layers_done
        return (
            f"experts are still moving to placement {version} (layers done: {begun}): they move with steps that "
            "compute requests; send the next placement afterwards"
        )

    def hold(self) -> ExpertPlacement:
        """Stop moving experts until `resume`; return their placement. Call while no step is in flight."""
        self._is_held = True
        return self.migration.placement

    def resume(self) -> None:
        """Let experts move again."""
        self._is_held = False

    def change_weights(self, *, are_sent: bool = False) -> None:
        """Restart a running migration and the counts, which belong to the previous weights.

        Hosts that start later begin with the current placement if the weights `are_sent`, because they are kept in it,
        else with experts in their own order.
        """
        self.first = self.migration.placement if are_sent else self._own_order
        if not self.migration.progress.is_done:
            self.migration.begin(self.migration.target)
        self.forget_counts()

    def reset(self, cause: Reset) -> None:
        """Restart for new weights or replaced hosts."""
        if isinstance(cause, NewWeights):
            self.change_weights(are_sent=cause.are_sent)
        elif isinstance(cause, ReplacedHosts):
            self.restart(cause.layout)

    def restart(self, layout: GroupLayout) -> None:
        """Restart on other hosts, which begin with the placement `first`, and migrate them to the former target.

        If the number of ranks has changed, experts stay in the placement of the layout, or in their own order, until a
        plan for these ranks arrives.
        """
        with self._target_lock:
            target, first = self._wanted.pop() if self._wanted else self.migration.target, self.first
            if layout.num_expert_ranks != first.ep_size:
                own_order = layout.placement or identity_placement(
                    first.num_layers,
                    first.num_experts,
                    ep_size=layout.num_expert_ranks,
                    num_redundant=layout.num_redundant_experts,
                )
                first = self.first = self._own_order = target = own_order
            self.migration.reset(first, hosts=layout.num_hosts, slices=layout.num_slices)
            if target is not first:
                self._wanted.append(target)
        self._steps_with_pieces.clear()
        none = np.zeros_like(self.reading.counts)
        self.reading = LoadReading(self.reading.generation + 1, self._num_steps, none)
        self.on_reading()

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Add the next piece, and every few steps a request for counts, to a step that computes something."""
        if not schedule.plan.num_chunks:
            return schedule
        self._num_steps += 1
        piece = self._next_piece() if self.moves_experts else None
        wants_counts = self._num_steps % self.counts_every == 0
        if piece is None and not wants_counts:
            return schedule
        if piece is not None:
            self._steps_with_pieces.add(schedule.plan.step_id)
        return replace(schedule, plan=replace(schedule.plan, migration=piece, wants_expert_counts=wants_counts))

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Record a result's expert counts, if any, and a failed fetch."""
        self._steps_with_pieces.discard(result.step_id)
        if result.failed_fetch is not None and result.failed_fetch.version > self.migration.given_up_version:
            log.error("an expert fetch failed: layers from %d on keep their placement", result.failed_fetch.layer)
            self.migration.give_up(result.failed_fetch)
        if result.expert_counts is not None:
            self.peak_rows = _peak_rows(self.reading.counts, result.expert_counts)
            if result.routing is not None and len(result.routing):
                sample = result.routing[:ROWS_PER_STEP].copy(), len(result.routing)
                self._rows = (*self._rows[1 - SAMPLED_STEPS :], sample)
            self.reading = LoadReading(self.reading.generation, self._num_steps, result.expert_counts)
            self.on_reading()

    def _next_piece(self) -> MigrationPiece | None:
        """Return the next piece, or None. A migration begins once all pieces of the previous one have returned."""
        if self._is_held:
            return None
        if not self._wanted:
            return self.migration.next_piece()
        if self._steps_with_pieces:
            return None
        with self._target_lock:
            try:
                self.migration.begin(self._wanted.pop())
            except PlacementError as error:  # the plan was made before hosts were lost
                log.warning("ignored an expert plan: %s", error)
        return self.migration.next_piece()


def placement_elsewhere(
    eplb: EplbSteps, former_ranks: Several[int | None], *, num_redundant: int
) -> ExpertPlacement | None:
    """Return the placement for hosts of another number that move few experts (`carried_placement`).

    None if experts stay in their own order. Call while no step is in flight.
    """
    if not eplb.moves_experts:
        return None
    tokens = eplb.reading.counts.astype(np.int32).view(np.uint32).astype(np.int64)
    return carried_placement(eplb.first, tokens, former_ranks=former_ranks, num_redundant=num_redundant)


def _peak_rows(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return the hottest expert's rows between two readings over the layer's mean, 1 without rows; counts wrap."""
    counted = now.astype(np.int32).view(np.uint32) - before.astype(np.int32).view(np.uint32)
    means = counted.mean(axis=1)
    return np.where(means > 0, counted.max(axis=1) / np.where(means > 0, means, 1), 1.0)


def _is_same(one: ExpertPlacement, other: ExpertPlacement) -> bool:
    return np.array_equal(one.expert_of_slot, other.expert_of_slot) and np.array_equal(
        one.share_of_slot, other.share_of_slot
    )


def _ignore() -> None:
    return None
