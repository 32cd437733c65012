"""Prefix cache: a radix tree from token ids to KV pages, as in SGLang's RadixAttention.

It handles pages and token ids only; the caller decides when to evict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import numpy as np

from rayserve_moe.scheduling.eviction_order import CachedPrefix, EvictionOrder, pages_of
from rayserve_moe.scheduling.page_events import PagesAdded, PagesCleared, PagesRemoved, PageWatcher
from rayserve_moe.scheduling.pages import NULL_PAGE, PageAllocator

TOKEN_BYTES = 4


class PrefixTree:
    """Radix tree over whole pages, with its own reference to every page in it.

    Namespaces are separate. A holder of tree pages locks their prefix, or releases the pages before the next `evict`;
    therefore `num_evictable` is exact. `num_cached_pages` counts pages that can be matched. Pages computed before a
    `clear` must not be inserted after it. Owners and protections change the order of eviction, nothing else.
    """

    def __init__(self, allocator: PageAllocator, *, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size {page_size} must be at least 1 token")
        self._allocator = allocator
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = CachedPrefix()
        self._cleared = CachedPrefix()  # root of paths that were cleared while locked
        self.order = EvictionOrder()
        """Decides which pages `evict` drops."""
        self._num_uses = 0
        self._watcher: PageWatcher | None = None
        self.num_cached_pages = self.num_evictable = 0
        self.max_protected = 0
        """Pages that may be protected at a time."""
        self.on_evict: Callable[[CachedPrefix], object] | None = None
        """Called with a leaf that is evicted, before its pages are freed."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds for the ends of protections."""

    def match(self, namespace: Hashable, token_ids: np.ndarray, *, owner: Hashable = None) -> CachedPrefix:
        """Return the longest cached prefix of `token_ids` int32 [T] in whole pages, marked as used now by `owner`."""
        return self._use(self._end_at(namespace, token_ids), owner=owner)

    def match_length(self, namespace: Hashable, token_ids: np.ndarray) -> int:
        """Return the number of tokens that `match` would find, without marking them as used."""
        node, num_pages = self._find(namespace, token_ids)
        return (node.num_pages - len(node.own_page_ids) + num_pages) * self.page_size

    def matching_pages(self, namespace: Hashable, token_ids: np.ndarray) -> np.ndarray:
        """Return the pages that `match` would find, int32, without marking them as used."""
        node, num_pages = self._find(namespace, token_ids)
        return node.page_ids[: node.num_pages - len(node.own_page_ids) + num_pages]

    def insert(
        self, namespace: Hashable, token_ids: np.ndarray, *, page_ids: np.ndarray, owner: Hashable = None
    ) -> CachedPrefix:
        """Cache `token_ids` int32 [n * page_size] with their pages `page_ids` int32 [n], and return the prefix.

        It is marked as used now by `owner`, who owns the added pages. For runs that are already cached, the tree keeps
        its own pages, and the returned prefix names these. The caller keeps its references.
        """
        assert len(token_ids) == len(page_ids) * self.page_size, "only whole pages can be cached"
        node = self._end_at(namespace, token_ids)
        added = np.array(page_ids[node.num_pages :], np.int32)
        if len(added):
            self._allocator.share(added)
            run = np.asarray(token_ids[node.num_pages * self.page_size :], np.int32).tobytes()
            key = run[: self._page_bytes] if node.parent else (namespace, run[: self._page_bytes])
            if self._watcher is not None:
                self._watcher(PagesAdded(namespace, node.last_page, run, added))
            added_node = CachedPrefix(key, node, run, added, node.num_pages + len(added), owner=owner)
            node.children[key] = node = added_node
            self.order.enter(node)
            self.num_cached_pages += len(added)
            self.num_evictable += len(added)
        return self._use(node, owner=owner)

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
            self.order.queue(prefix)

    def evict(self, num_pages: int) -> int:
        """Drop pages in the order of eviction until `num_pages` became free, or all that are evictable.

        Returns: the number of freed pages.
        """
        self.order.expire(self.clock())
        num_free = self._allocator.num_free
        while (missing := num_free + num_pages - self._allocator.num_free) > 0 and (leaf := self.order.pop()):
            self._shorten(leaf, min(missing, len(leaf.own_page_ids)))
        return self._allocator.num_free - num_free

    def protect(
        self, namespace: Hashable, token_ids: np.ndarray, *, seconds: float = 0.0, holder: Hashable = None
    ) -> None:
        """Protect the cached pages of `token_ids` from the first page on, as many as may be.

        They stay so for some seconds, or, with a holder, until `order.unpin`.
        """
        now = self.clock()
        nodes = self._protectable(namespace, token_ids, now=now)
        if holder is None:
            self.order.protect(nodes, until=now + seconds)
        else:
            self.order.pin(nodes, holder)

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
            self.order = EvictionOrder(self._root.below())

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
        self.order.check_integrity(cached)

    def _find(self, namespace: Hashable, token_ids: np.ndarray) -> tuple[CachedPrefix, int]:
        """Return the node in which the longest cached prefix of `token_ids` ends, and its number of matching pages."""
        run = np.asarray(token_ids, np.int32).tobytes()
        node, place, width = self._root, 0, self._page_bytes
        child = node.children.get((namespace, run[:width]))
        while child is not None:
            node = child
            if not run.startswith(node.run, place):
                return node, _num_common_tokens(run[place:], node.run) // self.page_size
            place += len(node.run)
            child = node.children.get(run[place : place + width])
        return node, len(node.own_page_ids)

    def _end_at(self, namespace: Hashable, token_ids: np.ndarray) -> CachedPrefix:
        """Return the node at the end of the longest cached prefix of `token_ids`, splitting a node if necessary."""
        node, num_pages = self._find(namespace, token_ids)
        return node if num_pages == len(node.own_page_ids) else self._split(node, num_pages)

    def _protectable(self, namespace: Hashable, token_ids: np.ndarray, *, now: float) -> list[CachedPrefix]:
        """Return the first cached nodes of `token_ids` that are protected, or may be within `max_protected`."""
        self.order.expire(now)
        node = self._end_at(namespace, token_ids)
        num_new = sum(len(each.own_page_ids) for each in node.path_up() if not each.is_protected)
        num_allowed = max(0, self.max_protected - self.order.num_protected)
        if num_new > num_allowed:
            # Unprotected pages end the path.
            end = node.num_pages - num_new + num_allowed
            node = self._end_at(namespace, token_ids[: end * self.page_size])
        return list(node.path_up())

    def _split(self, node: CachedPrefix, num_pages: int) -> CachedPrefix:
        """Move the first `num_pages` pages of a node into a new parent, and return the parent.

        The lower half stays the end of all prefixes that refer to it, so that locks are removed along the same path.
        """
        above, cut, pages = node.parent, num_pages * self._page_bytes, node.own_page_ids
        assert above is not None and num_pages < len(pages), "the node cannot be split"
        end = node.num_pages - len(pages) + num_pages
        head = CachedPrefix(node.key, above, node.run[:cut], pages[:num_pages].copy(), end, node.last_used)
        head.num_locks, head.is_released = node.num_locks, node.is_released
        head.owner, head.protected_until, head.pins = node.owner, node.protected_until, node.pins
        self.order.leave(node)
        above.children[head.key] = head
        node.run, node.own_page_ids = node.run[cut:], pages[num_pages:].copy()
        node.key, node.parent = node.run[: self._page_bytes], head
        head.children[node.key] = node
        self.order.enter(head)
        self.order.enter(node)
        return head

    def _use(self, node: CachedPrefix, *, owner: Hashable) -> CachedPrefix:
        """Mark `node` and its ancestors as used now by `owner`."""
        self._num_uses += 1
        self.order.use(node, self._num_uses, owner=owner)
        return node

    def _shorten(self, leaf: CachedPrefix, count: int) -> None:
        """Free the last `count` pages of an unlocked leaf."""
        kept = len(leaf.own_page_ids) - count
        above = self._split(leaf, kept) if kept else leaf.parent
        assert above is not None, "a root is not a leaf"
        if self.on_evict is not None:
            self.on_evict(leaf)
        if self._watcher is not None:
            self._watcher(PagesRemoved(leaf.own_page_ids))
        self.num_cached_pages -= count
        self.num_evictable -= count
        self.order.leave(leaf)
        self._drop([leaf])
        self.order.queue(above)

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
