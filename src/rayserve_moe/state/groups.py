"""Page groups, whose layers share a page table, and entry groups, whose layers share numbers of entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rayserve_moe.config.derive import pages_per_sequence
from rayserve_moe.config.settings import CacheSettings, SchedulerSettings


class EntryGroup(NamedTuple):
    """Layers of an entry kind; their entries have the same numbers."""

    kind: str
    """Name of their state kind."""
    entry_tokens: int
    """Tokens between entries."""
    num_entries: int
    """Entries of each layer on a data rank, the null entry included."""
    interval: int = 0
    """Tokens of a prompt between entries that stay for prefixes to be found, a multiple of `entry_tokens`; 0: none."""


class PageGroup(NamedTuple):
    """Layers with the same page table: those with the same window, whatever they keep on their pages."""

    window: int
    """Number of positions that a query sees. 0: all."""
    num_pages: int
    """Pages of each layer on a data rank."""


def page_groups(
    windows: Iterable[int], num_pages: int, *, scheduler: SchedulerSettings, cache: CacheSettings
) -> tuple[PageGroup, ...]:
    """Return the groups of layers with `windows`, by window.

    A group without a window has `num_pages` pages, as sequences do. A group with a window has no more than all rows can
    see at once: before a step, the positions of window - 1 tokens each, which lie on a page more than they fill; in
    it, the tokens of a step, on up to a page more per row. As many again serve cached prefixes, and another is the
    null page.
    """
    shares = 2 if cache.enable_prefix_caching else 1

    def max_seen_pages(window: int) -> int:
        per_row = pages_per_sequence(window - 1, cache.page_size) + 2
        in_step = pages_per_sequence(scheduler.max_step_tokens, cache.page_size)
        return shares * (scheduler.max_running_requests * per_row + in_step) + 1

    return tuple(
        PageGroup(window, min(num_pages, max_seen_pages(window)) if window else num_pages)
        for window in sorted(set(windows))
    )
