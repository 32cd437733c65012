"""Access of other threads to the prefix cache and load of a running engine."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from rayserve_moe.engine.command_queue import CommandQueue
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.scheduling.page_events import PageEvents
from rayserve_moe.scheduling.scheduler import finish_session, watch_pages
from rayserve_moe.scheduling.sequence import Sequence


class PageWatch:
    """Prefix cache and load of an engine. Nothing is recorded before `start`.

    `num_data_ranks`, `num_pages`, `page_size` and `num_rows` are the engine's.
    """

    def __init__(self, cycle: StepCycle, commands: CommandQueue) -> None:
        self._cycle, self._commands = cycle, commands
        ranks, table = cycle.scheduler.ranks, cycle.scheduler.table
        self.num_data_ranks, self.num_pages = len(ranks), ranks[0].allocator.num_usable + 1
        self.page_size, self.num_rows = table.page_size, len(table.sequences)

    def load(self) -> tuple[int, int]:
        """Return the live requests, counted in choices, and the prompt tokens not computed yet.

        May be called from any thread; the numbers are approximate.
        """
        scheduler, queued = self._cycle.scheduler, self._queued()
        num_tokens = sum(max(0, sequence.num_tokens - sequence.num_computed) for sequence in queued)
        return len(list(scheduler.waiting)) + len(scheduler.running), num_tokens

    def tokens_without_pages(self) -> int:
        """Return the number of prompt tokens without a page. May be called from any thread; approximate."""
        return sum(max(0, each.num_tokens - len(each.pages) * self.page_size) for each in self._queued())

    def start(self, events: PageEvents) -> Future[None]:
        """Record the cached pages, and all changes from now on, replacing any earlier recorder."""
        return self._commands.call(partial(watch_pages, self._cycle.scheduler, events))

    def finish_session(self, session: str) -> Future[None]:
        """Mark the cached pages of a session to be evicted first, except pages that other requests have used."""
        return self._commands.call(partial(finish_session, self._cycle.scheduler, session))

    def _queued(self) -> list[Sequence]:
        """Return the sequences whose known tokens are not all computed."""
        scheduler = self._cycle.scheduler
        return [*scheduler.waiting, *(sequence for rank in scheduler.ranks for sequence in list(rank.prefilling))]
