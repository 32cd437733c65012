"""KV page pool: free pages, reference counts, and a generation number per allocation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayserve_moe.state.protocol import SequenceState

NULL_PAGE = 0


class PageAllocator:
    """Allocator of pages with reference counts.

    Page 0 is never allocated: padding writes there. Every allocation of a page gets a new generation number that is
    never reused, so that data kept elsewhere by KV slot can be matched to its owner. Page ids are int32 arrays.
    `states` are notified of every page that is allocated or freed.
    """

    def __init__(self, num_pages: int, *, states: tuple[SequenceState, ...] = ()) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages {num_pages} must be at least 2: page {NULL_PAGE} holds padding")
        self.num_pages = num_pages
        self._states = states
        self.generations = np.zeros(num_pages, np.int64)
        self._references = np.zeros(num_pages, np.int32)  # indexed by intp: numpy takes a slow path for int32
        # A stack: `[free, lowest id on top | places of pages in use]`.
        self._free = np.arange(num_pages - 1, NULL_PAGE, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._num_allocations = 0
        self._places = np.zeros(num_pages, np.int32)
        self._counting = np.arange(num_pages, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_usable(self) -> int:
        """Return the number of pages that can be allocated at all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> np.ndarray | None:
        """Take `count` pages with one reference each, int32 [count], or return None if fewer are free."""
        assert count >= 0, f"{count} pages cannot be taken"
        rest = self._num_free - count
        if rest < 0:
            return None
        page_ids = self._free[rest : self._num_free][::-1].copy()
        self._num_free = rest
        index = page_ids.astype(np.intp)
        self._references[index] = 1
        first = self._num_allocations + 1
        self._num_allocations += count
        self.generations[index] = np.arange(first, first + count)
        for state in self._states:
            state.grow(page_ids)
        return page_ids

    def share(self, page_ids: np.ndarray) -> None:
        """Add a reference to each of `page_ids` [n], distinct pages in use."""
        index = page_ids.astype(np.intp)
        self._references[index] = self._counts_in_use(index, "is free") + 1

    def release(self, page_ids: np.ndarray) -> None:
        """Drop a reference from each of `page_ids` [n], distinct pages; pages without references become free."""
        index = page_ids.astype(np.intp)
        counts = self._counts_in_use(index, "is released twice") - 1
        self._references[index] = counts
        freed = page_ids if not np.count_nonzero(counts) else page_ids[counts == 0]
        end = self._num_free + len(freed)
        self._free[self._num_free : end] = freed
        self._num_free = end
        for state in self._states:
            state.forget(freed)

    def references(self, page_ids: np.ndarray) -> np.ndarray:
        """Return the number of references to each of `page_ids` [n], int32 [n]."""
        return self._references[page_ids]

    def check_integrity(self, holders: Iterable[np.ndarray | list[int]]) -> None:
        """Assert that the counts equal an independent count over `holders`, and that free pages have no references."""
        held = np.concatenate([np.zeros(0, np.int64), *(np.asarray(page_ids, np.int64) for page_ids in holders)])
        assert ((held >= 0) & (held < self.num_pages)).all(), "a held page does not exist"
        counted = np.bincount(held, minlength=self.num_pages)
        for page in np.flatnonzero(self._references != counted):
            raise AssertionError(f"page {page}: {self._references[page]} != {counted[page]}")
        expected_free = np.setdiff1d(np.flatnonzero(counted == 0), [NULL_PAGE])
        assert np.array_equal(np.sort(self._free[: self._num_free]), expected_free), "free list is wrong"

    def _counts_in_use(self, index: np.ndarray, complaint: str) -> np.ndarray:
        """Return the references of the pages at `index`, which must be in use and distinct.

        A repeated page would be counted only once.
        """
        counts = self._references[index]
        assert np.count_nonzero(counts) == len(index), f"page {index[counts.argmin()]} {complaint}"
        order = self._counting[: len(index)]
        self._places[index] = order
        assert not np.count_nonzero(self._places[index] != order), "a page appears twice in one call"
        return counts
