"""The KV page pool: which pages are free, how many sequences refer to each, and which allocation each belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

NULL_PAGE = 0


class PageAllocator:
    """Hands out pages with reference counts.

    Page 0 belongs to nobody: padding writes there. Every allocation of a page gets a new generation number, never
    used before, so that data kept elsewhere by KV slot can tell whose it is.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages {num_pages}: at least 2 are needed, page {NULL_PAGE} holds padding")
        self.num_pages = num_pages
        self.generations = np.zeros(num_pages, np.int64)
        self._references = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_allocations = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold at all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages with one reference each, or none at all where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_allocations += 1
            self.generations[page] = self._num_allocations
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that the counts equal an independent count over all `holders`, and that free pages have none."""
        counted = Counter(page for pages in holders for page in pages)
        for page in range(self.num_pages):
            assert self._references[page] == counted[page], f"page {page}: {self._references[page]} != {counted[page]}"
        expected_free = {p for p in range(1, self.num_pages) if counted[p] == 0}
        assert set(self._free) == expected_free and len(self._free) == len(expected_free), "free list is wrong"
