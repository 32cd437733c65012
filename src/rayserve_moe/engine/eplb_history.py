"""What came of the plans that were followed: a record of each of the last ones, and totals over all."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import replace

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.proposal import Proposal
from rayserve_moe.balancing.view import MigrationRecord

MOST_RECORDS = 64
UNDER_WAY, FINISHED, REPLACED, FAILED = "under way", "finished", "replaced", "failed"


class MigrationHistory:
    """Follows `migration` to the ends of what was begun; may be asked from any thread.

    `totals` counts migrations `begun`, `finished`, `replaced` and `failed`, and slots `moved`.
    """

    def __init__(self, migration: Migration) -> None:
        self.totals = Counter[str]()
        self._migration = migration
        self._records: deque[MigrationRecord] = deque(maxlen=MOST_RECORDS)
        self._target: ExpertPlacement | None = None
        self._lock = threading.Lock()

    def begin(self, proposal: Proposal, target: ExpertPlacement, *, step: int) -> None:
        """Note that the engine was asked to head for a plan's placement, the next of its versions."""
        record = MigrationRecord(
            proposal.version,
            step,
            time.time(),
            0,
            0,
            proposal.imbalance_before,
            proposal.imbalance_after,
            proposal.plan_seconds,
            UNDER_WAY,
        )
        with self._lock:
            self._settle()
            self._target = target
            self._records.append(record)
            self.totals["begun"] += 1

    def records(self) -> list[MigrationRecord]:
        """The last ones, oldest first, as far as they have come."""
        with self._lock:
            self._settle()
            return list(self._records)

    def _settle(self) -> None:
        if self._target is None:
            return
        record, migration = self._records[-1], self._migration
        progress = migration.progress
        if progress.version < record.version:
            return
        outcome = FINISHED if progress.is_done else UNDER_WAY
        if migration.target is not self._target:
            outcome = FAILED if migration.given_up_version >= record.version else REPLACED
        if outcome != REPLACED:
            record = replace(record, moved_slots=progress.num_slots, layers=progress.num_layers)
        record = replace(record, outcome=outcome)
        self._records[-1] = record
        if record.outcome != UNDER_WAY:
            self._target = None
            self.totals.update({record.outcome: 1, "moved": record.moved_slots})
