"""Evicted pages of a data rank in the memory of its hosts, by name, and their return before a sequence starts.

The engine decides and keeps the names; hosts hold the bytes in numbered slots (`execution.page_store`). A plan carries
the copies. Pages that it restores can be found from the next plan on, in the prefix tree like others.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.prefix_tree import TOKEN_BYTES
from rayserve_moe.scheduling.sequence import Sequence, reusable_tokens
from rayserve_moe.scheduling.step_plan import NO_SLOT, HostSizes
from rayserve_moe.state.entries import EntryState

RESTORED_TOKENS, RESTORED_PAGES = 1024, 16
"""Maximum tokens that a plan restores on a data rank, and the number of pages that it may always restore."""
NAME_BYTES = 16
_KEY = secrets.token_bytes(32)

PageName = bytes
"""Digest of the namespace of a prefix and of its tokens up to the end of the page."""


class PageRows(Protocol):
    """Routing rows of pages. They move to host memory and back with their pages."""

    def of_page(self, data_rank: int, page: int, *, generation: int) -> Any:
        """Return a copy of the rows of all tokens of a page, or None if some are not known."""
        ...

    def put(self, data_rank: int, page: int, *, generation: int, rows: Any) -> None:
        """Store rows for another allocation of a page."""
        ...


@dataclass(slots=True)
class HostedPage:
    """A page in host memory."""

    slot: int
    entry_slot: int
    """Slot of its entries; NO_SLOT for none."""
    are_held: tuple[bool, ...]
    """True for each state whose data is in host memory."""
    rows: Any
    """Routing rows (`PageRows`); None on a server that captures none."""

    def covers(self, are_held: tuple[bool, ...]) -> bool:
        """Return True if it has the data of each state with True."""
        return all(has or not wanted for has, wanted in zip(self.are_held, are_held, strict=True))


@dataclass(slots=True)
class Arrival:
    """Pages on their way to the devices, behind a locked prefix."""

    sequence: Sequence
    names: frozenset[PageName]
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
        self._rank, self._sizes = rank, sizes
        self._first_entry = sum(not isinstance(state, EntryState) for state in rank.states)
        """Index of the first state with entries."""
        self._pages: OrderedDict[PageName, HostedPage] = OrderedDict()
        self._with_entry: dict[PageName, None] = {}
        self._free = list(range(sizes.num_pages))[::-1]
        self._free_entries = list(range(sizes.num_entries))[::-1]
        self._arrival: Arrival | None = None
        self._offloads: list[list[int]] = []
        self._restores: list[list[int]] = []
        self.counts = HostCounts()
        self.rows: PageRows | None = None
        self.pays: Callable[[int], bool] = _always
        """Returns True if it is faster to restore a number of pages than to compute them."""
        self.max_restored = max(RESTORED_PAGES, RESTORED_TOKENS // self._page_size)
        """Pages that a plan restores at most."""
        rank.host, rank.tree.on_evict = self, self.keep

    @property
    def num_pages(self) -> int:
        return len(self._pages)

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

    def num_found(self, sequence: Sequence) -> int:
        """Return the number of first tokens that a waiting sequence can skip after a restore; 0 for no restore."""
        names, num_cached = self._restorable(sequence)
        return (num_cached + len(names)) * self._page_size if names and self.pays(len(names)) else 0

    def delays(self, sequence: Sequence) -> bool:
        """Begin to restore pages for a waiting sequence; return True if it has to wait for them."""
        names, num_cached = self._restorable(sequence)
        if not names or not self.pays(len(names)):
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
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        rank, cache, page_ids = self._rank, arrival.sequence.cache, arrival.page_ids
        for state in rank.states:
            state.end_restore(page_ids)
        if self.rows is not None:
            for page, hosted in zip(page_ids.tolist(), arrival.pages, strict=True):
                generation = int(rank.allocator.generations[page])
                self.rows.put(rank.index, page, generation=generation, rows=hosted.rows)
        all_ids = np.concatenate([arrival.prefix.page_ids, page_ids])
        token_ids = arrival.sequence.token_ids[: len(all_ids) * self._page_size]
        rank.tree.insert(cache.namespace, token_ids, page_ids=all_ids, owner=cache.owner)
        rank.tree.unlock(arrival.prefix)
        rank.allocator.release(page_ids)
        self.counts.restored += len(page_ids)

    def record_left(self, sequence: Sequence) -> None:
        """Count the pages in host memory that a starting sequence computes again."""
        self.counts.left += len(self._restorable(sequence)[0])

    def limit_restored(self, num_pages: int) -> None:
        """Set the maximum number of pages that a plan restores; at least 1."""
        self.max_restored = max(1, min(num_pages, max(RESTORED_PAGES, RESTORED_TOKENS // self._page_size)))

    def take_moves(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the copies of the plan that ends: pages to offload, then pages to restore."""
        moves, self._offloads, self._restores = (self._offloads, self._restores), [], []
        return moves

    def clear(self) -> None:
        """Drop all pages, and those on their way."""
        if (arrival := self._arrival) is not None:
            self._arrival = None
            for state in self._rank.states:
                state.end_restore(arrival.page_ids)
            self._rank.tree.unlock(arrival.prefix)
            self._rank.allocator.release(arrival.page_ids)
        self._pages.clear()
        self._with_entry.clear()
        self._free = list(range(self._sizes.num_pages))[::-1]
        self._free_entries = list(range(self._sizes.num_entries))[::-1]
        self._offloads, self._restores = [], []

    def check_integrity(self) -> None:
        """Assert that every slot is free or has one page."""
        slots = [hosted.slot for hosted in self._pages.values()]
        assert sorted([*slots, *self._free]) == list(range(self._sizes.num_pages)), "slots are lost or shared"
        entries = {name: hosted.entry_slot for name, hosted in self._pages.items() if hosted.entry_slot != NO_SLOT}
        assert set(entries) == set(self._with_entry), "pages with entries are miscounted"
        assert sorted([*entries.values(), *self._free_entries]) == list(range(self._sizes.num_entries)), "entries"

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
        if (known := self._pages.get(name)) is not None:
            self._pages.move_to_end(name)
            if self._is_arriving(name) or known.covers(are_held):
                return
        rows = None
        if self.rows is not None:
            rows = self.rows.of_page(rank.index, page, generation=int(rank.allocator.generations[page]))
            if rows is None:
                self.counts.without_rows += 1
                return
        if known is not None:
            self._forget(name)
        if not self._free:
            oldest = next(iter(self._pages))
            if self._is_arriving(oldest):
                return
            self._forget(oldest)
        slot, entry_slot = self._free.pop(), NO_SLOT
        if any(are_held[self._first_entry :]):
            entry_slot = self._take_entry()
            if entry_slot == NO_SLOT:
                are_held = (*are_held[: self._first_entry], *(False for _ in are_held[self._first_entry :]))
            else:
                self._with_entry[name] = None
        self._pages[name] = HostedPage(slot, entry_slot, are_held, rows)
        self._offloads.append([rank.index, slot, entry_slot, *self._places_of(page)])
        self.counts.offloaded += 1

    def _take_entry(self) -> int:
        """Return a free slot for entries, or take the slot of the page that has held one the longest."""
        if not self._free_entries:
            oldest = next(iter(self._with_entry), None)
            if oldest is None or self._is_arriving(oldest):
                return NO_SLOT
            hosted = self._pages[oldest]
            self._free_entries.append(hosted.entry_slot)
            del self._with_entry[oldest]
            hosted.entry_slot = NO_SLOT
            lost = (False for _ in hosted.are_held[self._first_entry :])
            hosted.are_held = (*hosted.are_held[: self._first_entry], *lost)
        return self._free_entries.pop()

    def _forget(self, name: PageName) -> None:
        hosted = self._pages.pop(name)
        self._free.append(hosted.slot)
        if hosted.entry_slot != NO_SLOT:
            del self._with_entry[name]
            self._free_entries.append(hosted.entry_slot)

    def _is_arriving(self, name: PageName) -> bool:
        return self._arrival is not None and name in self._arrival.names

    def _restorable(self, sequence: Sequence) -> tuple[list[PageName], int]:
        """Return the names of pages to restore behind the cached pages of a sequence, and the number of the latter."""
        rank, cache = self._rank, sequence.cache
        if not self._pages:
            return [], 0
        token_ids = reusable_tokens(sequence)
        num_pages = len(token_ids) // self._page_size
        if len(cache.page_names) < num_pages:
            cache.page_names = page_names(cache.namespace, token_ids.tobytes(), page_bytes=self._page_bytes)
        num_cached = rank.tree.match_length(cache.namespace, token_ids) // self._page_size
        found = list(takewhile(self._pages.__contains__, cache.page_names[num_cached:num_pages]))
        if not found or not rank.states:
            return found, num_cached
        cached_ids = rank.tree.matching_pages(cache.namespace, token_ids)
        usable = np.ones(len(cached_ids) + len(found) + 1, np.bool_)
        for place, state in enumerate(rank.states):
            hosted = np.array([self._pages[name].are_held[place] for name in found])
            usable &= state.usable(np.concatenate([state.place_of[cached_ids] > 0, hosted]))
        count = int(np.flatnonzero(usable)[-1]) - len(cached_ids)
        return found[: max(0, count)], num_cached

    def _begin(self, sequence: Sequence, names: list[PageName], *, prefix: CachedPrefix) -> None:
        """Allocate pages behind a locked prefix for others in host memory."""
        rank, pages = self._rank, [self._pages[name] for name in names]
        for name in names:
            self._pages.move_to_end(name)
        self._arrival = Arrival(sequence, frozenset(names), prefix, self.arriving, pages)
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
