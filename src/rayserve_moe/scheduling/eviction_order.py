"""Cached runs of pages, and the order in which they are evicted.

Released pages leave first, then pages by their last use, then protected pages. The order decides nothing else: locked
pages never leave, and unlocked pages always can.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rayserve_moe.scheduling.pages import NULL_PAGE

RELEASED, ORDINARY, PROTECTED = range(3)
"""Classes of cached pages, in the order in which they are evicted."""


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
    owner: Hashable = None
    """Session that computed the pages, if no other request has used them since."""
    is_released: bool = False
    """True if its owner has no more use for it."""
    protected_until: float = 0.0
    """Time at which its protection ends; 0 without protection."""
    pins: frozenset[Hashable] = frozenset()
    """Keys of the prompts that choices without a row need (`forks.PromptPins`)."""

    @property
    def page_ids(self) -> np.ndarray:
        """Return all pages in token order, int32 [num_pages]."""
        return pages_of(reversed(list(self.path_up())))

    @property
    def last_page(self) -> int:
        """Return the last page; NULL_PAGE for a root."""
        return int(self.own_page_ids[-1]) if len(self.own_page_ids) else NULL_PAGE

    @property
    def is_protected(self) -> bool:
        return bool(self.protected_until or self.pins)

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


class NodeHeap:
    """Nodes by a key, with lazy deletion: the entry of a node may have an older, smaller key, checked by `pop`.

    `key_of` returns None for nodes that are not in the heap.
    """

    SLACK = 64
    """Outdated entries that are always allowed."""

    def __init__(self, key_of: Callable[[CachedPrefix], Any]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[Any, int, CachedPrefix]] = []
        self._keys: dict[CachedPrefix, Any] = {}
        """Key of the valid entry of each node."""

    def add(self, node: CachedPrefix) -> None:
        """Add a node, or move it forward if its key became smaller."""
        key, known = self._key_of(node), self._keys.get(node)
        if key is None or (known is not None and known <= key):
            return
        self._keys[node] = key
        heappush(self._heap, (key, id(node), node))
        if len(self._heap) > 2 * len(self._keys) + self.SLACK:
            self._heap = [(known, id(each), each) for each, known in self._keys.items()]
            heapify(self._heap)

    def discard(self, node: CachedPrefix) -> None:
        """Remove a node if it is in the heap."""
        self._keys.pop(node, None)

    def pop(self, *, last: Any = None) -> CachedPrefix | None:
        """Remove and return the node with the smallest key, or None if there is none up to `last`."""
        while self._heap and (last is None or self._heap[0][0] <= last):
            queued, _, node = heappop(self._heap)
            if self._keys.get(node) != queued:
                continue
            del self._keys[node]
            if self._key_of(node) == queued:
                return node
            self.add(node)
        return None

    def check_integrity(self, cached: list[CachedPrefix]) -> None:
        """Assert that each node of `cached` with a key is queued, with a key that is not larger."""
        assert set(self._keys) <= set(cached), "a node is queued after its end"
        assert {(each, key) for key, _, each in self._heap} >= set(self._keys.items()), "a node has lost its entry"
        assert len(self._heap) <= 2 * len(self._keys) + self.SLACK + len(cached), "outdated entries pile up"
        keys = [(self._keys.get(node), key) for node in cached if (key := self._key_of(node)) is not None]
        assert all(queued is not None and queued <= key for queued, key in keys), "a node is not queued, or too late"


class EvictionOrder:
    """Classes of the cached nodes of a tree, their owners, and the queue of the leaves.

    All descendants of an owned node have the same owner: a use by another request ends the ownership of all ancestors.
    """

    def __init__(self, nodes: Iterable[CachedPrefix] = ()) -> None:
        self.num_protected = 0
        """Pages of protected nodes."""
        self._leaves = NodeHeap(_leaf_key)
        self._expiring = NodeHeap(lambda node: node.protected_until or None)
        self._owned: dict[Hashable, dict[CachedPrefix, None]] = {}
        """Nodes of each owner: no more than there are pages."""
        for node in nodes:
            self.enter(node)

    def enter(self, node: CachedPrefix) -> None:
        """Take up a node with its owner and protection."""
        if node.owner is not None:
            self._owned.setdefault(node.owner, {})[node] = None
        if node.is_protected:
            self.num_protected += len(node.own_page_ids)
        self._expiring.add(node)
        self._leaves.add(node)

    def leave(self, node: CachedPrefix) -> None:
        """Remove a node that is evicted, or whose pages will change."""
        self._disown(node)
        if node.is_protected:
            self.num_protected -= len(node.own_page_ids)
        self._expiring.discard(node)
        self._leaves.discard(node)

    def queue(self, node: CachedPrefix) -> None:
        """Queue a node if it is evictable."""
        self._leaves.add(node)

    def pop(self) -> CachedPrefix | None:
        """Remove and return the first evictable leaf, or None."""
        return self._leaves.pop()

    def use(self, node: CachedPrefix, clock: int, *, owner: Hashable) -> None:
        """Mark a node and its ancestors as used by `owner`."""
        for passed in node.path_up():
            passed.last_used, passed.is_released = clock, False
            if passed.owner is not None and passed.owner != owner:
                self._disown(passed)
                passed.owner = None
        self._leaves.add(node)

    def finish(self, owner: Hashable) -> None:
        """Let all pages of an owner leave first, except those that other requests have used."""
        self._release(list(self._owned.get(owner, ())))

    def supersede(self, prefix: CachedPrefix, owner: Hashable) -> None:
        """Let the owner's other branches leave first, which part from `prefix` after a page of its own.

        Branches in use stay in their place.
        """
        path = set(prefix.path_up())
        own = [node for node in prefix.path_up() if node.owner == owner]
        if own:
            self._release(node for node in own[-1].below() if node not in path and not node.num_locks)

    def protect(self, nodes: Iterable[CachedPrefix], *, until: float) -> None:
        """Protect nodes at least until a time."""
        for node in nodes:
            node.is_released = False
            self._set_protection(node, until=max(node.protected_until, until), pins=node.pins)

    def pin(self, nodes: Iterable[CachedPrefix], holder: Hashable) -> None:
        """Protect nodes until `unpin` with the same holder."""
        for node in nodes:
            self._set_protection(node, until=node.protected_until, pins=node.pins | {holder})

    def unpin(self, nodes: Iterable[CachedPrefix], holder: Hashable) -> None:
        """Remove the pins of a holder; other protections of the nodes stay."""
        for node in nodes:
            self._set_protection(node, until=node.protected_until, pins=node.pins - {holder})

    def expire(self, now: float) -> None:
        """End the protections whose time is over."""
        while node := self._expiring.pop(last=now):
            self._set_protection(node, until=0.0, pins=node.pins)

    def check_integrity(self, cached: list[CachedPrefix]) -> None:
        """Assert that owners, protections and queues agree with the nodes of `cached`."""
        owned = {(node, owner) for owner, nodes in self._owned.items() for node in nodes}
        assert owned == {(node, node.owner) for node in cached if node.owner is not None}, "owners are wrong"
        assert all(self._owned.values()), "an owner without pages is kept"
        tops = [(node, node.parent) for node in cached if node.parent is not None and node.parent.parent is not None]
        protected = (node.protected_until <= above.protected_until and node.pins <= above.pins for node, above in tops)
        assert all(protected), "a protected page hangs free"
        assert all(node.parent.owner in (None, node.owner) for node in cached if node.parent), "owners mix"
        num_protected = sum(len(node.own_page_ids) for node in cached if node.is_protected)
        assert num_protected == self.num_protected, "protected pages are miscounted"
        self._leaves.check_integrity(cached)
        self._expiring.check_integrity(cached)

    def _release(self, nodes: Iterable[CachedPrefix]) -> None:
        """Let nodes leave first, until they are used again."""
        for node in nodes:
            node.is_released = True
            self._set_protection(node, until=0.0, pins=node.pins)

    def _set_protection(self, node: CachedPrefix, *, until: float, pins: frozenset[Hashable]) -> None:
        """Set both kinds of protection of a node, and count and queue it anew."""
        was_protected = node.is_protected
        node.protected_until, node.pins = until, pins
        self.num_protected += len(node.own_page_ids) * (node.is_protected - was_protected)
        if not until:
            self._expiring.discard(node)
        self._expiring.add(node)
        self._leaves.add(node)

    def _disown(self, node: CachedPrefix) -> None:
        if (nodes := self._owned.get(node.owner)) is not None:
            nodes.pop(node, None)
            if not nodes:
                del self._owned[node.owner]


def pages_of(nodes: Iterable[CachedPrefix]) -> np.ndarray:
    """Return the own pages of nodes in order, int32."""
    return np.concatenate([np.zeros(0, np.int32), *(node.own_page_ids for node in nodes)])


def _leaf_key(node: CachedPrefix) -> tuple[int, int] | None:
    """Return the place of an evictable node in the order; None for other nodes."""
    if not node.is_evictable:
        return None
    return PROTECTED if node.is_protected else RELEASED if node.is_released else ORDINARY, node.last_used
