"""Rows, pages and cached prefixes of one data-parallel rank."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence, reusable_tokens
from rayserve_moe.state.groups import EntryGroup, PageGroup
from rayserve_moe.state.paged import states_of

EVICTION_BATCH = 16
"""Cached pages evicted at once, if there are as many, so that the next few allocations find free ones."""


class HostCache(Protocol):
    """Evicted pages in host memory (`host_pages.HostPages`)."""

    @property
    def arriving(self) -> np.ndarray:
        """Return pages of the rank that are held for copies on their way, int32."""
        ...

    def num_found(self, sequence: Sequence) -> int:
        """Return the number of first tokens that a waiting sequence can skip after a restore; 0 for no restore."""
        ...

    def delays(self, sequence: Sequence) -> bool:
        """Begin to restore pages for a waiting sequence; return True if it has to wait for them."""
        ...

    def arrive(self) -> None:
        """Cache the pages that the last plan restored."""
        ...

    def record_start(self, sequence: Sequence, page_ids: np.ndarray) -> None:
        """Record a starting sequence with its cached pages."""
        ...

    def clear(self) -> None:
        """Drop all pages, and those on their way."""
        ...

    def check_integrity(self) -> None:
        """Assert that every slot is free or has one page."""
        ...


class DataRank:
    """Sequences, pages and cached prefixes of one rank, none of them shared with other ranks, and their states.

    Every event of a page or row goes to all states. A cached prefix is used up to the last page at which all of them
    are usable.
    """

    def __init__(
        self,
        index: int,
        rows: range,
        *,
        num_pages: int,
        table: RowTable,
        page_groups: tuple[PageGroup, ...] = (),
        entry_groups: tuple[EntryGroup, ...] = (),
    ) -> None:
        self.index = index
        self.rows = rows
        self.table = table
        """Shared by all ranks."""
        self.states, self.page_maps = states_of(
            page_groups, entry_groups, num_rank_pages=num_pages, page_size=table.page_size, num_rows=len(rows)
        )
        """States beside the pages of the rank, and maps from these to the pages of each page table."""
        self.entry_tokens = max((group.entry_tokens for group in entry_groups), default=0)
        """Tokens from one entry of a state to the next; 0 without entries."""
        self._kept_tokens = max(self.entry_tokens, table.page_size)
        """Tokens from one entry to the next that ends with a page."""
        self._entry_groups = entry_groups
        self.allocator = PageAllocator(num_pages, states=self.states)
        self.tree = PrefixTree(self.allocator, page_size=table.page_size)
        self.free_rows = list(reversed(rows))
        self.running: list[Sequence] = []
        """Sequences in its rows, oldest first."""
        self.prefilling: list[Sequence] = []
        """Running sequences whose known tokens are not all computed; the others decode."""
        self._decoding: np.ndarray | None = None
        self.host: HostCache | None = None
        """Evicted pages in host memory; None without such a cache."""
        self._num_flushes = 0

    @property
    def num_available(self) -> int:
        """Return the number of pages that are free, or cached and not in use."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def decoding_rows(self) -> np.ndarray:
        """Return the rows of the sequences that decode, oldest first, intp (numpy is slower with other indices)."""
        if self._decoding is None:
            prompts = {sequence.row for sequence in self.prefilling}
            self._decoding = np.asarray([s.row for s in self.running if s.row not in prompts], np.intp)
        return self._decoding

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence are cached here and usable in every state."""
        if not self.tree.num_cached_pages:
            return 0
        namespace, token_ids = sequence.cache.namespace, reusable_tokens(sequence)
        if not self.states:
            return self.tree.match_length(namespace, token_ids)
        page_ids = self.tree.matching_pages(namespace, token_ids)
        are_usable = np.all([state.usable(state.place_of[page_ids] > 0) for state in self.states], axis=0)
        return int(np.flatnonzero(are_usable)[-1]) * self.table.page_size

    def lock_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Find the cached prefix of a waiting sequence, and keep it from being evicted."""
        token_ids = reusable_tokens(sequence)
        if self.states:
            token_ids = token_ids[: self.num_cached(sequence)]
        if self._entry_groups:
            sequence.cache.kept_positions = self._kept_positions(sequence, len(token_ids))
        prefix = self.tree.match(sequence.cache.namespace, token_ids, owner=sequence.cache.owner)
        self.tree.lock(prefix)
        return prefix

    def admit(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Make a sequence the youngest running one; it starts after its cached prefix, whose lock it takes over."""
        row = self.free_rows.pop()
        self.table.take(row, sequence)
        sequence.data_rank, cache = self.index, sequence.cache
        if self.host is not None:
            self.host.record_start(sequence, prefix.page_ids)
        cache.prefix, cache.num_flushes = prefix, self._num_flushes
        if cache.owner is not None and sequence.choice_index == 0:
            self.tree.order.supersede(prefix, cache.owner)
        page_ids = prefix.page_ids
        self.allocator.share(page_ids)
        for state in self.states:
            position = len(page_ids) * self.table.page_size
            state.enter(row - self.rows.start, page_ids, position=position, kept=cache.kept_positions)
        self.table.extend(row, page_ids, generations=self.allocator.generations[page_ids])
        self.table.num_computed[row] = len(page_ids) * self.table.page_size
        self.running.append(sequence)
        self.prefilling.append(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        """Move a sequence on whose known tokens are all computed."""
        self.prefilling.remove(sequence)
        self._decoding = None

    def dismiss(self, sequence: Sequence) -> None:
        """Take a running sequence out of its row; it keeps its pages, and nothing in the states."""
        for state in self.states:
            positions = min(sequence.num_computed, sequence.num_tokens), sequence.num_computed
            state.leave(sequence.row - self.rows.start, sequence.pages, positions=positions)
        self.free_rows.append(sequence.row)
        self.table.leave(sequence)
        self.running.remove(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self._decoding = None

    def take_pages(self, count: int) -> np.ndarray | None:
        """Allocate pages, evicting cached pages if too few are free; return None if that is not enough."""
        pages = self.allocator.allocate(count)
        if pages is None and self.num_available >= count:
            self.tree.evict(max(count - self.allocator.num_free, EVICTION_BATCH))
            pages = self.allocator.allocate(count)
        return pages

    def cache_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the whole pages of the first `num_tokens` of a sequence to the prefix cache; they stay locked for it.

        Pages computed before a flush are not cached after it, nor tokens beyond `num_cacheable`.
        """
        cache = sequence.cache
        num_pages = min(min(num_tokens, cache.num_cacheable) // self.table.page_size, len(sequence.pages))
        assert cache.prefix is not None, "only a sequence that was admitted has computed pages"
        if num_pages <= cache.prefix.num_pages or cache.num_flushes != self._num_flushes:
            return
        token_ids = sequence.token_ids[: num_pages * self.table.page_size]
        if self._entry_groups and self._has_twins(sequence, token_ids) and _are_pages_used(sequence):
            return
        page_ids = sequence.pages[:num_pages]
        longer = self.tree.insert(cache.namespace, token_ids, page_ids=page_ids, owner=cache.owner)
        self.tree.lock(longer)
        self.tree.unlock(cache.prefix)
        cache.prefix = longer

    def release_pages(self, sequence: Sequence) -> None:
        """Release all pages of a sequence that has left its row."""
        prefix = sequence.cache.prefix
        if prefix is not None:
            for state in self.states:
                cached_ids = prefix.page_ids
                state.hand_over(sequence.pages[: len(cached_ids)], cached_ids)
            self.tree.unlock(prefix)
            sequence.cache.prefix = None
        self.allocator.release(sequence.release_pages())

    def flush(self) -> None:
        """Flush the prefix cache; running sequences keep their pages."""
        if self.host is not None:
            self.host.clear()
        self.tree.clear()
        self._num_flushes += 1

    def check_integrity(self) -> None:
        """Assert that pages, prefixes, rows and states of this rank add up against an independent count."""
        self.tree.check_integrity()
        if self.host is not None:
            self.host.check_integrity()
        arriving = [] if self.host is None else self.host.arriving
        self.allocator.check_integrity([*(s.pages for s in self.running), self.tree.held_page_ids(), arriving])
        num_unshared = int((self.allocator.references(self.tree.held_page_ids()) == 1).sum())
        assert self.tree.num_evictable <= num_unshared, "pages in use are taken for evictable ones"
        is_allocated = self.allocator.references(np.arange(self.allocator.num_pages)) > 0
        for state in self.states:
            pages_of_rows = ((s.row - self.rows.start, s.pages) for s in self.running)
            state.check_integrity(pages_of_rows, is_allocated=is_allocated)
        taken = [sequence.row for sequence in self.running]
        assert sorted(taken + self.free_rows) == list(self.rows), "rows are lost or shared"
        assert all(sequence in self.running for sequence in self.prefilling), "a prompt is computed without a row"

    def _kept_positions(self, sequence: Sequence, num_cached: int) -> tuple[int, ...]:
        """Return the positions after `num_cached` tokens at which entries of a sequence stay to be found, ascending.

        They are the last entry of its known tokens, for siblings and retries; the last entry of the cached pages that
        it shares, for sequences with the same beginning; and the multiples of a configured interval.
        """
        grid, shared = self._kept_tokens, self.tree.match_length(sequence.cache.namespace, sequence.token_ids)
        last = (sequence.num_tokens - 1) // grid * grid
        intervals = {max(grid, group.interval) for group in self._entry_groups if group.interval}
        at_intervals = {place for interval in intervals for place in range(interval, last, interval)}
        positions = {last, min(shared // grid * grid, last), *at_intervals}
        return tuple(sorted(position for position in positions if position > num_cached))

    def _has_twins(self, sequence: Sequence, token_ids: np.ndarray) -> bool:
        """Return True if other pages are cached with tokens of a sequence; they then get the entries of its own pages.

        A sequence computes cached tokens anew where they lack an entry. If it locked the twins as well, it would hold
        twice the pages that it needs: its own are cached once no choice of its request runs.
        """
        cached_ids = self.tree.matching_pages(sequence.cache.namespace, token_ids)
        page_ids = sequence.pages[: len(cached_ids)]
        if np.array_equal(page_ids, cached_ids):
            return False
        for state in self.states:
            state.hand_over(page_ids, cached_ids)
        return True


def running_adapters(rank: DataRank) -> set[str]:
    """Return the adapters of the running sequences of a rank."""
    return {sequence.request.adapter for sequence in rank.running} - {""}


def num_found(rank: DataRank, sequence: Sequence) -> int:
    """Return the number of first tokens of a waiting sequence that a rank has cached or can restore."""
    num_cached = rank.num_cached(sequence)
    return num_cached if rank.host is None else max(num_cached, rank.host.num_found(sequence))


def _are_pages_used(sequence: Sequence) -> bool:
    """Return True if a choice of a request has a row, and reads pages that it may share with the sequence."""
    return any(choice.row != NO_ROW for choice in (sequence, *sequence.group.choices))
