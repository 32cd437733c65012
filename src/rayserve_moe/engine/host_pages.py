"""Evicted pages in host memory, as a feature of steps: copies in plans, and the choice to restore or to compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe.engine.extension import Reset, StepExtension
from rayserve_moe.scheduling.host_pages import HostPages, PageRows
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.step_plan import HostSizes, PageMoves, StartReport, StepResult

NEW_SHARE = 0.1
"""Weight of the latest step in a rate."""
COPY_SHARE = 0.5
"""Share of a step's time that copies of restored pages may take, so that the next step does not wait for them."""


def hosted_pages_for(scheduler: Scheduler, report: StartReport, *, rows: PageRows | None) -> HostedPages | None:
    """Return the extension of a started server; None if its hosts keep no pages."""
    return HostedPages(scheduler, report.host, rows=rows) if report.host.num_pages else None


class HostedPages(StepExtension):
    """Copies evicted pages to host memory, and copies them back if that is faster than to compute them.

    Times are moving means: of a copied page as hosts measure it, and of a prompt token in steps with prompts. A
    restored sequence waits a step longer. Until all these times are known, pages are restored.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sizes: HostSizes,
        *,
        rows: PageRows | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sizes, self._clock = sizes, clock
        self._page_size = scheduler.table.page_size
        self._rows, self.next_step = rows, 0
        """`next_step` is the id of the next plan."""
        self.hosts = [HostPages(rank, sizes) for rank in scheduler.ranks]
        for host in self.hosts:
            host.rows, host.pays = rows, self._pays
        self._page_s = self._token_s = self._step_s = 0.0
        """Seconds of a copied page, of a prompt token and of a step; 0 before the first."""
        self._submitted_at: dict[int, float] = {}
        self._returned_at = 0.0

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Add the copies of all data ranks."""
        self.next_step = schedule.plan.step_id + 1
        offloads, restores = [], []
        for host in self.hosts:
            for moves, own in zip((offloads, restores), host.take_moves(), strict=True):
                moves += own
        if not offloads and not restores:
            return schedule
        moves = PageMoves(np.array(offloads, np.int32), np.array(restores, np.int32))
        return replace(schedule, plan=replace(schedule.plan, moves=moves))

    def submitted(self, schedule: Schedule) -> None:
        """Record the start of a step."""
        self._submitted_at[schedule.plan.step_id] = self._clock()

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Record how long a step and its copies took."""
        now = self._clock()
        took = now - max(self._submitted_at.pop(result.step_id, self._returned_at), self._returned_at)
        self._returned_at = now
        self._step_s = _mean(self._step_s, took)
        if schedule.plan.has_blocks:
            self._token_s = _mean(self._token_s, took / schedule.plan.num_tokens)
        if result.copied.num_pages:
            self._page_s = _mean(self._page_s, result.copied.seconds / result.copied.num_pages)
            for host in self.hosts:
                host.limit_restored(int(COPY_SHARE * self._step_s / self._page_s))

    def reset(self, cause: Reset) -> None:
        """Forget the steps of lost hosts."""
        self._submitted_at.clear()

    def statistics(self) -> dict[str, float]:
        """Return the current number of pages in host memory, and totals of pages."""
        counts = [host.counts for host in self.hosts]
        return {
            "host_pages_total": float(self._sizes.num_pages * len(self.hosts)),
            "host_pages_used": float(sum(host.num_pages for host in self.hosts)),
            "host_pages_offloaded": float(sum(each.offloaded for each in counts)),
            "host_pages_restored": float(sum(each.restored for each in counts)),
            "host_pages_computed": float(sum(each.left for each in counts)),
            "host_pages_without_rows": float(sum(each.without_rows for each in counts)),
        }

    def for_push(self, rows: Any) -> tuple[Any] | None:
        """Return the rows of a page for another server, in a tuple; None if a version differs from the current."""
        if self._rows is None:
            return (None,)
        pushed = self._rows.for_push(rows)
        return None if pushed is None else (pushed,)

    def from_push(self, rows: Any) -> Any:
        """Return the rows of a page of another server."""
        return None if self._rows is None else self._rows.from_push(rows)

    def _pays(self, num_pages: int) -> bool:
        """Return True if it is faster to restore pages than to compute their tokens."""
        if not self._page_s or not self._token_s:
            return True
        return self._step_s + num_pages * self._page_s < num_pages * self._page_size * self._token_s


def _mean(mean: float, value: float) -> float:
    """Return the moving mean with another value; 0 stands for no value."""
    return value if not mean else (1 - NEW_SHARE) * mean + NEW_SHARE * value
