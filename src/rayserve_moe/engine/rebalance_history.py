"""What came of the plans that were followed: a record of each of the last ones, and totals over all."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import replace

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.proposal import Proposal
from rayserve_moe.balancing.rebalance import Rebalance
from rayserve_moe.balancing.view import RebalanceRecord

MOST_RECORDS = 64
UNDER_WAY, FINISHED, REPLACED, FAILED = "under way", "finished", "replaced", "failed"


class RebalanceHistory:
    """Follows `rebalance` to the ends of what was begun; may be asked from any thread.

    `totals` counts rebalances `begun`, `finished`, `replaced` and `failed`, and slots `moved`.
    """

    def __init__(self, rebalance: Rebalance) -> None:
        self.totals = Counter[str]()
        self._rebalance = rebalance
        self._records: deque[RebalanceRecord] = deque(maxlen=MOST_RECORDS)
        self._target: ExpertPlacement | None = None
        self._lock = threading.Lock()

    def begin(self, proposal: Proposal, target: ExpertPlacement, *, step: int) -> None:
        """Note that the engine was asked to head for a plan's placement, the next of its versions."""
        record = RebalanceRecord(
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

    def records(self) -> list[RebalanceRecord]:
        """The last ones, oldest first, as far as they have come."""
        with self._lock:
            self._settle()
            return list(self._records)

    def _settle(self) -> None:
        if self._target is None:
            return
        record, rebalance = self._records[-1], self._rebalance
        progress = rebalance.progress
        if progress.version < record.version:
            return
        outcome = FINISHED if progress.is_done else UNDER_WAY
        if rebalance.target is not self._target:
            outcome = FAILED if rebalance.given_up_version >= record.version else REPLACED
        if outcome != REPLACED:
            record = replace(record, moved_slots=progress.num_slots, layers=progress.num_layers)
        record = replace(record, outcome=outcome)
        self._records[-1] = record
        if record.outcome != UNDER_WAY:
            self._target = None
            self.totals.update({record.outcome: 1, "moved": record.moved_slots})
