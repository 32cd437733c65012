"""Prefix cache: a radix tree from token ids to KV pages with LRU eviction, as in SGLang's RadixAttention.

It handles pages and token ids only; the caller decides when to evict.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from rayserve_moe.scheduling.page_events import PagesAdded, PagesCleared, PagesRemoved, PageWatcher
from rayserve_moe.scheduling.pages import NULL_PAGE, PageAllocator


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """Cached run of whole pages, represented by its last node. It is only guaranteed to stay while locked."""

    key: Any = None
    """Key in the parent's `children`."""
    parent: CachedPrefix | None = None
    """None for a root."""
    run: bytes = b""
    """Token ids of `own_page_ids`, int32 as bytes, so that matching compares memory."""
    own_page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Pages that this node adds to its parent's, int32; none for a root."""
    num_pages: int = 0
    """Pages from the root on; negative once evicted."""
    last_used: int = 0
    """Clock of the tree at the last use."""
    children: dict[Any, CachedPrefix] = field(default_factory=dict)
    num_locks: int = 0
    """Locks on this node and its descendants."""
    num_own_locks: int = 0
    """Locks that end at this node."""
    is_queued: bool = False
    """True if it has an entry in the `LeafQueue`."""

    @property
    def page_ids(self) -> np.ndarray:
        """Return all pages in token order, int32 [num_pages]."""
        return pages_of(reversed(list(self.path_up())))

    @property
    def last_page(self) -> int:
        """Return the last page; NULL_PAGE for a root."""
        return int(self.own_page_ids[-1]) if len(self.own_page_ids) else NULL_PAGE

    @property
    def is_evictable(self) -> bool:
        return not self.children and not self.num_locks and self.parent is not None

    def path_up(self) -> Iterator[CachedPrefix]:
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[CachedPrefix]:
        """Yield all descendants, each after its parent."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class LeafQueue:
    """Leaves by last use, as a heap with lazy deletion: entries are checked when they are popped."""

    def __init__(self, nodes: Iterable[CachedPrefix] = ()) -> None:
        self._heap: list[tuple[int, int, CachedPrefix]] = []  # last use when queued, tie-break, node
        for node in nodes:
            node.is_queued = False
            self.add(node)

    def add(self, node: CachedPrefix) -> None:
        """Queue a node if it is evictable and not queued yet."""
        if node.is_evictable and not node.is_queued:
            node.is_queued = True
            heappush(self._heap, (node.last_used, id(node), node))

    def pop(self) -> CachedPrefix | None:
        """Remove and return the least recently used evictable leaf, or None."""
        while self._heap:
            last_used, _, node = heappop(self._heap)
            node.is_queued = False
            if node.is_evictable and node.last_used == last_used:
                return node
            self.add(node)
        return None

    def check_integrity(self, cached: list[CachedPrefix]) -> None:
        """Assert that each evictable node of `cached` is queued once, with a time not later than its last use."""
        queued = {node for _, _, node in self._heap}
        assert len(queued) == len(self._heap) and queued <= set(cached), "a node is queued twice, or after its end"
        assert queued == {node for node in cached if node.is_queued}, "a node has lost its place in the queue"
        assert queued >= {node for node in cached if node.is_evictable}, "a leaf is not queued"
        assert all(last_used <= node.last_used for last_used, _, node in self._heap), "a node is queued too late"


def pages_of(nodes: Iterable[CachedPrefix]) -> np.ndarray:
    """Return the own pages of nodes in order, int32."""
    return np.concatenate([np.zeros(0, np.int32), *(node.own_page_ids for node in nodes)])


TOKEN_BYTES = 4


class PrefixTree:
    """Radix tree over whole pages, with its own reference to every page in it.

    Namespaces are separate. A holder of tree pages locks their prefix, or releases the pages before the next `evict`;
    therefore `num_evictable` is exact. `num_cached_pages` counts pages that can be matched. Pages computed before a
    `clear` must not be inserted after it.
    """

    def __init__(self, allocator: PageAllocator, *, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size {page_size} must be at least 1 token")
        self._allocator = allocator
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = CachedPrefix()
        self._cleared = CachedPrefix()  # root of paths that were cleared while locked
        self._queue = LeafQueue()
        self._clock = 0
        self._watcher: PageWatcher | None = None
        self.num_cached_pages = self.num_evictable = 0

    def match(self, namespace: Hashable, token_ids: np.ndarray) -> CachedPrefix:
        """Return the longest cached prefix of `token_ids` int32 [T] in whole pages, marked as used now."""
        return self._use(self._end_at(namespace, token_ids))

    def match_length(self, namespace: Hashable, token_ids: np.ndarray) -> int:
        """Return the number of tokens that `match` would find, without marking them as used."""
        node, num_pages = self._find(namespace, token_ids)
        return (node.num_pages - len(node.own_page_ids) + num_pages) * self._page_size

    def matching_pages(self, namespace: Hashable, token_ids: np.ndarray) -> np.ndarray:
        """Return the pages that `match` would find, int32, without marking them as used."""
        node, num_pages = self._find(namespace, token_ids)
        return node.page_ids[: node.num_pages - len(node.own_page_ids) + num_pages]

    def insert(self, namespace: Hashable, token_ids: np.ndarray, *, page_ids: np.ndarray) -> CachedPrefix:
        """Cache `token_ids` int32 [n * page_size] with their pages `page_ids` int32 [n], and return the prefix.

        It is marked as used now. For runs that are already cached, the tree keeps its own pages, and the returned
        prefix names these. The caller keeps its references.
        """
        assert len(token_ids) == len(page_ids) * self._page_size, "only whole pages can be cached"
        node = self._end_at(namespace, token_ids)
        added = np.array(page_ids[node.num_pages :], np.int32)
        if len(added):
            self._allocator.share(added)
            run = np.asarray(token_ids[node.num_pages * self._page_size :], np.int32).tobytes()
            key = run[: self._page_bytes] if node.parent else (namespace, run[: self._page_bytes])
            if self._watcher is not None:
                self._watcher(PagesAdded(namespace, node.last_page, run, added))
            node.children[key] = CachedPrefix(key, node, run, added, node.num_pages + len(added))
            node = node.children[key]
            self.num_cached_pages += len(added)
            self.num_evictable += len(added)
        return self._use(node)

    def lock(self, prefix: CachedPrefix) -> None:
        """Lock `prefix` and its ancestors until the same number of `unlock` calls."""
        assert prefix.num_pages >= 0, "the prefix was evicted"
        prefix.num_own_locks += 1
        for passed in prefix.path_up():
            if passed.num_locks == 0:
                self.num_evictable -= len(passed.own_page_ids)
            passed.num_locks += 1

    def unlock(self, prefix: CachedPrefix) -> None:
        """Remove a lock; pages that were cleared meanwhile are freed with their last lock."""
        assert prefix.num_own_locks > 0, "a prefix is unlocked more often than it was locked"
        prefix.num_own_locks -= 1
        path = list(prefix.path_up())
        for passed in path:
            passed.num_locks -= 1
        idle = [passed for passed in path if passed.num_locks == 0]
        if path and path[-1].parent is self._cleared:
            self._drop(idle)
        else:
            self.num_evictable += sum(len(passed.own_page_ids) for passed in idle)
            self._queue.add(prefix)

    def evict(self, num_pages: int) -> int:
        """Drop the least recently used pages until `num_pages` became free, or all evictable ones.

        Return the number freed.
        """
        num_free = self._allocator.num_free
        while (missing := num_free + num_pages - self._allocator.num_free) > 0 and (leaf := self._queue.pop()):
            self._shorten(leaf, min(missing, len(leaf.own_page_ids)))
        return self._allocator.num_free - num_free

    def clear(self, namespace: Hashable = None) -> None:
        """Remove a namespace, or all namespaces for None. Locked pages are freed by their last unlock."""
        tops = [node for key, node in self._root.children.items() if namespace is None or key[0] == namespace]
        if self._watcher is not None:
            gone = (PagesRemoved(node.own_page_ids) for top in tops for node in (top, *top.below()))
            for change in [PagesCleared()] if namespace is None else gone:
                self._watcher(change)
        unlocked: list[CachedPrefix] = []
        for top in tops:
            del self._root.children[top.key]
            # A unique key: the same prefix may be cleared again while this node still waits.
            top.key, top.parent = object(), self._cleared
            self._cleared.children[top.key] = top
            for node in (top, *top.below()):
                self.num_cached_pages -= len(node.own_page_ids)
                if node.num_locks == 0:
                    self.num_evictable -= len(node.own_page_ids)
                    unlocked.append(node)
        if tops:
            self._drop(unlocked)
            self._queue = LeafQueue(self._root.below())

    def watch(self, watcher: PageWatcher) -> None:
        """Report the cached pages, and all changes from now on."""
        self._watcher = watcher
        for (namespace, _), top in self._root.children.items():
            for node in (top, *top.below()):
                above = node.parent or self._root
                watcher(PagesAdded(namespace, above.last_page, node.run, node.own_page_ids))

    def held_page_ids(self) -> np.ndarray:
        """Return all pages with a reference of the tree, int32, including cleared pages that are still locked."""
        return pages_of([*self._root.below(), *self._cleared.below()])

    def check_integrity(self) -> None:
        """Assert that structure, locks, counts and eviction queue agree with an independent walk over the tree."""
        cached, waiting = list(self._root.below()), list(self._cleared.below())
        for node in (*cached, *waiting):
            above, num_locks_below = node.parent, sum(child.num_locks for child in node.children.values())
            assert above is not None and above.children.get(node.key) is node, "a node is not a child of its parent"
            assert len(node.run) == len(node.own_page_ids) * self._page_bytes > 0, "tokens and pages of a node differ"
            assert node.num_pages == above.num_pages + len(node.own_page_ids), "the pages of a node are miscounted"
            assert above.parent is None or node.key == node.run[: self._page_bytes], "a node has a wrong key"
            assert above.parent is None or node.last_used <= above.last_used, "a node was used without its parent"
            assert node.num_locks == node.num_own_locks + num_locks_below, "locks are miscounted"
        assert all(node.num_locks for node in waiting), "a cleared page waits without a lock"
        page_ids, held = pages_of(cached), self.held_page_ids()
        assert len(np.unique(page_ids)) == len(page_ids) == self.num_cached_pages, "cached pages are miscounted"
        evictable = pages_of(node for node in cached if node.num_locks == 0)
        assert len(evictable) == self.num_evictable, "evictable pages are miscounted"
        assert NULL_PAGE not in held and self._allocator.references(held).all(), "a page is held without a reference"
        self._queue.check_integrity(cached)

    def _find(self, namespace: Hashable, token_ids: np.ndarray) -> tuple[CachedPrefix, int]:
        """Return the node in which the longest cached prefix of `token_ids` ends, and its number of matching pages."""
        run = np.asarray(token_ids, np.int32).tobytes()
        node, place, width = self._root, 0, self._page_bytes
        child = node.children.get((namespace, run[:width]))
        while child is not None:
            node = child
            if not run.startswith(node.run, place):
                return node, _num_common_tokens(run[place:], node.run) // self._page_size
            place += len(node.run)
            child = node.children.get(run[place : place + width])
        return node, len(node.own_page_ids)

    def _end_at(self, namespace: Hashable, token_ids: np.ndarray) -> CachedPrefix:
        """Return the node at the end of the longest cached prefix of `token_ids`, splitting a node if necessary."""
        node, num_pages = self._find(namespace, token_ids)
        return node if num_pages == len(node.own_page_ids) else self._split(node, num_pages)

    def _split(self, node: CachedPrefix, num_pages: int) -> CachedPrefix:
        """Move the first `num_pages` pages of a node into a new parent, and return the parent.

        The lower half stays the end of all prefixes that refer to it, so that locks are removed along the same path.
        """
        above, cut, pages = node.parent, num_pages * self._page_bytes, node.own_page_ids
        assert above is not None and num_pages < len(pages), "the node cannot be split"
        end = node.num_pages - len(pages) + num_pages
        head = CachedPrefix(node.key, above, node.run[:cut], pages[:num_pages].copy(), end, node.last_used)
        head.num_locks = node.num_locks
        above.children[head.key] = head
        node.run, node.own_page_ids = node.run[cut:], pages[num_pages:].copy()
        node.key, node.parent = node.run[: self._page_bytes], head
        head.children[node.key] = node
        return head

    def _use(self, node: CachedPrefix) -> CachedPrefix:
        """Mark `node` and its ancestors as used now."""
        self._clock += 1
        for passed in node.path_up():
            passed.last_used = self._clock
        self._queue.add(node)
        return node

    def _shorten(self, leaf: CachedPrefix, count: int) -> None:
        """Free the last `count` pages of an unlocked leaf."""
        kept = len(leaf.own_page_ids) - count
        above = self._split(leaf, kept) if kept else leaf.parent
        assert above is not None, "a root is not a leaf"
        if self._watcher is not None:
            self._watcher(PagesRemoved(leaf.own_page_ids))
        self.num_cached_pages -= count
        self.num_evictable -= count
        self._drop([leaf])
        self._queue.add(above)

    def _drop(self, nodes: list[CachedPrefix]) -> None:
        """Remove nodes together with all below them, and free their pages."""
        self._allocator.release(pages_of(nodes))
        for node in nodes:
            assert node.parent is not None, "a node is dropped twice"
            del node.parent.children[node.key]
            node.parent, node.num_pages = None, -1


def _num_common_tokens(run: bytes, other: bytes) -> int:
    size = min(len(run), len(other))
    differs = np.frombuffer(run[:size], np.int32) != np.frombuffer(other[:size], np.int32)
    return int(differs.argmax()) if differs.any() else len(differs)
