"""Evicted pages of a data rank in the memory of its hosts, by name, and their return before a sequence starts.

The engine decides and keeps the names; hosts hold the bytes in numbered slots (`execution.page_store`). A plan carries
the copies. Pages that it restores can be found from the next plan on, in the prefix tree like others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.host_slots import HostedPage, HostSlots, PageName
from rayserve_moe.scheduling.prefix_tree import TOKEN_BYTES
from rayserve_moe.scheduling.sequence import Sequence, reusable_tokens
from rayserve_moe.scheduling.step_plan import HostSizes
from rayserve_moe.state.entries import EntryState

RESTORED_TOKENS, RESTORED_PAGES = 1024, 16
"""Maximum tokens that a plan restores on a data rank, and the number of pages that it may always restore."""
NAME_BYTES = 16
_KEY = secrets.token_bytes(32)


class PageRows(Protocol):
    """Routing rows of pages. They move to host memory and back with their pages."""

    def of_page(self, data_rank: int, page: int, *, generation: int) -> Any:
        """Return a copy of the rows of all tokens of a page, or None if some are not known."""
        ...

    def put(self, data_rank: int, page: int, *, generation: int, rows: Any) -> None:
        """Store rows for another allocation of a page."""
        ...

    def for_push(self, rows: Any) -> Any:
        """Return rows without their version, for another server; None if they are not of the current weights."""
        ...

    def from_push(self, rows: Any) -> Any:
        """Return rows of another server, with the current version."""
        ...


@dataclass(slots=True)
class Arrival:
    """Pages on their way to the devices, behind a locked prefix."""

    sequence: Sequence
    prefix: CachedPrefix
    page_ids: np.ndarray
    pages: list[HostedPage]


@dataclass(slots=True)
class HostCounts:
    """Totals of pages."""

    offloaded: int = 0
    restored: int = 0
    left: int = 0
    """Pages that were in host memory, but were computed because that was faster."""
    without_rows: int = 0
    """Pages that were not offloaded, because some of their routing rows were not known."""


class HostPages:
    """Pages of a data rank in host memory, least recently used first.

    Pages of a request's own namespace are not kept. A page leaves its record when its slot is needed; a restored page
    keeps it, so that its next eviction copies nothing. Routing rows are part of the record: a page without rows is not
    kept on a server that returns them.
    """

    def __init__(self, rank: DataRank, sizes: HostSizes) -> None:
        self._rank = rank
        self._first_entry = sum(not isinstance(state, EntryState) for state in rank.states)
        """Index of the first state with entries."""
        self.slots = HostSlots(sizes, first_entry=self._first_entry)
        self._transferred = np.full(rank.allocator.num_pages, -1, np.int64)
        """Last allocation of each page of the rank that received a page of another replica, by its generation."""
        self._arrival: Arrival | None = None
        self._offloads: list[list[int]] = []
        self._restores: list[list[int]] = []
        self.counts, self.num_clears = HostCounts(), 0
        self.rows: PageRows | None = None
        self.pays: Callable[[int], bool] = _always
        """Returns True if it is faster to restore a number of pages than to compute them."""
        self.max_restored = max(RESTORED_PAGES, RESTORED_TOKENS // self._page_size)
        """Pages that a plan restores at most."""
        rank.host, rank.tree.on_evict = self, self.keep

    @property
    def num_pages(self) -> int:
        return len(self.slots.pages)

    @property
    def arriving(self) -> np.ndarray:
        """Return pages of the rank that are held for copies on their way, int32."""
        return np.zeros(0, np.int32) if self._arrival is None else self._arrival.page_ids

    def keep(self, leaf: CachedPrefix) -> None:
        """Copy the pages of a leaf out before they are freed, the last first."""
        *_, top = leaf.path_up()
        namespace = top.key[0]
        if not isinstance(namespace, tuple):
            return  # the prefixes of a single request
        runs = [node.run for node in leaf.path_up()][::-1]
        first = leaf.num_pages - len(leaf.own_page_ids)
        names = page_names(namespace, b"".join(runs), page_bytes=self._page_bytes, first=first)
        for page, name in reversed(list(zip(leaf.own_page_ids.tolist(), names, strict=True))):
            self._keep(page, name)

    def keep_prefix(self, namespace: Hashable, token_ids: np.ndarray, *, first: int) -> dict[PageName, HostedPage]:
        """Copy the cached pages of a prefix out, from page `first` on.

        Returns: the pages that are in host memory then, in order, without those behind a missing page.
        """
        names = page_names(namespace, token_ids.tobytes(), page_bytes=self._page_bytes, first=first)
        names = names[: self.slots.sizes.num_pages]
        cached_ids = self._rank.tree.matching_pages(namespace, token_ids)[first:]
        for page, name in zip(cached_ids.tolist(), names, strict=False):
            self._keep(page, name)
        return {name: self.slots.pages[name] for name in takewhile(self.slots.pages.__contains__, names)}

    def num_found(self, sequence: Sequence) -> int:
        """Return the number of first tokens that a waiting sequence can skip after a restore; 0 for no restore."""
        names, num_cached = self._restorable(sequence)
        return (num_cached + len(names)) * self._page_size if names and self._restores_pay(sequence, len(names)) else 0

    def delays(self, sequence: Sequence) -> bool:
        """Begin to restore pages for a waiting sequence; return True if it has to wait for them."""
        names, num_cached = self._restorable(sequence)
        if not names or not self._restores_pay(sequence, len(names)):
            return False
        rank, cache = self._rank, sequence.cache
        cached = sequence.token_ids[: num_cached * self._page_size]
        prefix = rank.tree.match(cache.namespace, cached, owner=cache.owner)
        rank.tree.lock(prefix)
        missing = -(-sequence.num_tokens // self._page_size) - prefix.num_pages
        fits = rank.allocator.num_free + rank.tree.num_evictable >= missing
        if fits and self._arrival is None:
            self._begin(sequence, names[: self.max_restored], prefix=prefix)
        else:
            rank.tree.unlock(prefix)
        return fits

    def arrive(self) -> None:
        """Cache the pages that the last plan restored."""
        arrival, self._arrival, self.slots.busy = self._arrival, None, frozenset()
        if arrival is None:
            return
        rank, cache, page_ids = self._rank, arrival.sequence.cache, arrival.page_ids
        for state in rank.states:
            state.end_restore(page_ids)
        for page, hosted in zip(page_ids.tolist(), arrival.pages, strict=True):
            generation = int(rank.allocator.generations[page])
            if self.rows is not None:
                self.rows.put(rank.index, page, generation=generation, rows=hosted.rows)
            if hosted.is_transferred:
                self._transferred[page] = generation
        all_ids = np.concatenate([arrival.prefix.page_ids, page_ids])
        token_ids = arrival.sequence.token_ids[: len(all_ids) * self._page_size]
        rank.tree.insert(cache.namespace, token_ids, page_ids=all_ids, owner=cache.owner)
        rank.tree.unlock(arrival.prefix)
        rank.allocator.release(page_ids)
        self.counts.restored += len(page_ids)

    def record_start(self, sequence: Sequence, page_ids: np.ndarray) -> None:
        """Count the pages in host memory that a starting sequence computes again.

        Also record which of its cached pages `page_ids` another replica has computed.
        """
        self.counts.left += len(self._restorable(sequence)[0])
        is_transferred = self._transferred[page_ids] == self._rank.allocator.generations[page_ids]
        borders = np.flatnonzero(np.diff(is_transferred, prepend=False, append=False)) * self._page_size
        sequence.cache.transferred = tuple(map(tuple, borders.reshape(-1, 2).tolist()))

    def limit_restored(self, num_pages: int) -> None:
        """Set the maximum number of pages that a plan restores; at least RESTORED_PAGES.

        A program copies RESTORED_PAGES in the time of one page. With a lower limit each page would seem slower, and the
        limit would sink further.
        """
        self.max_restored = max(RESTORED_PAGES, min(num_pages, RESTORED_TOKENS // self._page_size))

    def take_moves(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the copies of the plan that ends: pages to offload, then pages to restore."""
        moves, self._offloads, self._restores = (self._offloads, self._restores), [], []
        return moves

    def clear(self) -> None:
        """Drop all pages, and those on their way."""
        self.num_clears += 1
        if (arrival := self._arrival) is not None:
            self._arrival, self.slots.busy = None, frozenset()
            for state in self._rank.states:
                state.end_restore(arrival.page_ids)
            self._rank.tree.unlock(arrival.prefix)
            self._rank.allocator.release(arrival.page_ids)
        self.slots.clear()
        self._offloads, self._restores = [], []

    def check_integrity(self) -> None:
        """Assert that every slot is free, lent, or has one page."""
        self.slots.check_integrity()

    @property
    def _page_size(self) -> int:
        return self._rank.table.page_size

    @property
    def _page_bytes(self) -> int:
        return self._page_size * TOKEN_BYTES

    def _keep(self, page: int, name: PageName) -> None:
        """Copy a page out, unless its record has everything that the devices have."""
        rank = self._rank
        are_held = tuple(bool(state.place_of[page]) for state in rank.states)
        pages, generation = self.slots.pages, int(rank.allocator.generations[page])
        if (known := pages.get(name)) is not None:
            pages.move_to_end(name)
            if name in self.slots.busy or known.covers(are_held):
                return
        rows = None
        if self.rows is not None:
            rows = self.rows.of_page(rank.index, page, generation=generation)
            if rows is None:
                self.counts.without_rows += 1
                return
        if known is not None:
            self.slots.forget(name)
        hosted = self.slots.lend(are_held, rows=rows)
        if hosted is None:
            return
        hosted.is_transferred = bool(self._transferred[page] == generation)
        self.slots.name(hosted, name)
        self._offloads.append([rank.index, hosted.slot, hosted.entry_slot, *self._places_of(page)])
        self.counts.offloaded += 1

    def _restores_pay(self, sequence: Sequence, num_pages: int) -> bool:
        """Return True if pages are restored: always if another replica has computed them for a sequence."""
        return sequence.cache.is_pushed or self.pays(num_pages)

    def _restorable(self, sequence: Sequence) -> tuple[list[PageName], int]:
        """Return the names of pages to restore behind the cached pages of a sequence, and the number of the latter."""
        rank, cache = self._rank, sequence.cache
        if not self.slots.pages:
            return [], 0
        token_ids = reusable_tokens(sequence)
        num_pages = len(token_ids) // self._page_size
        if len(cache.page_names) < num_pages:
            cache.page_names = page_names(cache.namespace, token_ids.tobytes(), page_bytes=self._page_bytes)
        num_cached = rank.tree.match_length(cache.namespace, token_ids) // self._page_size
        found = list(takewhile(self.slots.pages.__contains__, cache.page_names[num_cached:num_pages]))
        if not found or not rank.states:
            return found, num_cached
        cached_ids = rank.tree.matching_pages(cache.namespace, token_ids)
        usable = np.ones(len(cached_ids) + len(found) + 1, np.bool_)
        for place, state in enumerate(rank.states):
            hosted = np.array([self.slots.pages[name].are_held[place] for name in found])
            usable &= state.usable(np.concatenate([state.place_of[cached_ids] > 0, hosted]))
        count = int(np.flatnonzero(usable)[-1]) - len(cached_ids)
        return found[: max(0, count)], num_cached

    def _begin(self, sequence: Sequence, names: list[PageName], *, prefix: CachedPrefix) -> None:
        """Allocate pages behind a locked prefix for others in host memory."""
        rank, pages = self._rank, [self.slots.pages[name] for name in names]
        for name in names:
            self.slots.pages.move_to_end(name)
        self._arrival, self.slots.busy = Arrival(sequence, prefix, self.arriving, pages), frozenset(names)
        page_ids: list[int] = []
        for hosted in pages:
            taken = rank.take_pages(1)
            assert taken is not None, "capacity was checked before"
            page_ids += taken.tolist()
            for state, is_held in zip(rank.states, hosted.are_held, strict=True):
                state.restore(page_ids[-1], is_held=is_held)
        self._arrival.page_ids = np.array(page_ids, np.int32)
        for page, hosted in zip(page_ids, pages, strict=True):  # a state may have dropped the first of them
            self._restores.append([rank.index, hosted.slot, hosted.entry_slot, *self._places_of(page)])

    def _places_of(self, page: int) -> list[int]:
        """Return the index of a page in every page table, then the indices of its entries."""
        rank = self._rank
        tables = [int(page_of[page]) for page_of in rank.page_maps] or [page]
        return [*tables, *(int(state.place_of[page]) for state in rank.states[self._first_entry :])]


def page_names(namespace: Hashable, run: bytes, *, page_bytes: int, first: int = 0) -> list[PageName]:
    """Return the names of the whole pages of `run`, int32 token ids as bytes, from page `first` on."""
    salt = blake2b(repr(namespace).encode("utf-8", "surrogatepass"), key=_KEY).digest()
    digest, names = blake2b(salt + run[: first * page_bytes], digest_size=NAME_BYTES, key=_KEY), []
    for start in range(first * page_bytes, len(run) - page_bytes + 1, page_bytes):
        digest.update(run[start : start + page_bytes])
        names.append(digest.digest())
    return names


def _always(num_pages: int) -> bool:
    """Return True."""
    return True
