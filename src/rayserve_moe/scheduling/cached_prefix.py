"""The nodes of a prefix tree, in the order in which its leaves are evicted: the least recently used first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from rayserve_moe.scheduling.pages import NULL_PAGE


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A cached run of whole pages, as the node of the tree where it ends; sure to stay only while locked.

    The node adds `own_page_ids` int32 with the tokens `run` to what `parent` holds; a root has no parent and adds
    nothing. `run` is the int32 token ids as bytes, so that a prompt is matched by comparing memory. `key` is the node's
    place among its parent's children. `num_pages` are those from the root on, below 0 once it was evicted. `num_locks`
    counts the locks on this node and below, `num_own_locks` those that end here.
    """

    key: Any = None
    parent: CachedPrefix | None = None
    run: bytes = b""
    own_page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_pages: int = 0
    last_used: int = 0
    children: dict[Any, CachedPrefix] = field(default_factory=dict)
    num_locks: int = 0
    num_own_locks: int = 0
    is_queued: bool = False

    @property
    def page_ids(self) -> np.ndarray:
        """All its pages in the order of the tokens, int32 [num_pages]."""
        return pages_of(reversed(list(self.path_up())))

    @property
    def last_page(self) -> int:
        """The page that it ends with; NULL_PAGE for a root."""
        return int(self.own_page_ids[-1]) if len(self.own_page_ids) else NULL_PAGE

    @property
    def is_evictable(self) -> bool:
        return not self.children and not self.num_locks and self.parent is not None

    def path_up(self) -> Iterator[CachedPrefix]:
        """This node and all above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[CachedPrefix]:
        """All nodes under this one, each after its parent."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class LeafQueue:
    """Leaves by their last use, as a heap with lazy deletion: an entry is checked when it is popped."""

    def __init__(self, nodes: Iterable[CachedPrefix] = ()) -> None:
        self._heap: list[tuple[int, int, CachedPrefix]] = []  # last use when queued, tie-break, node
        for node in nodes:
            node.is_queued = False
            self.add(node)

    def add(self, node: CachedPrefix) -> None:
        """Queue a node where it can be evicted, once."""
        if node.is_evictable and not node.is_queued:
            node.is_queued = True
            heappush(self._heap, (node.last_used, id(node), node))

    def pop(self) -> CachedPrefix | None:
        """Take out the evictable leaf that was used least recently, if there is one."""
        while self._heap:
            last_used, _, node = heappop(self._heap)
            node.is_queued = False
            if node.is_evictable and node.last_used == last_used:
                return node
            self.add(node)
        return None

    def check_integrity(self, cached: list[CachedPrefix]) -> None:
        """Assert that each evictable node of `cached` is queued, once, and by no later time than its last use."""
        queued = {node for _, _, node in self._heap}
        assert len(queued) == len(self._heap) and queued <= set(cached), "a node is queued twice, or after its end"
        assert queued == {node for node in cached if node.is_queued}, "a node has lost its place in the queue"
        assert queued >= {node for node in cached if node.is_evictable}, "a leaf is not queued"
        assert all(last_used <= node.last_used for last_used, _, node in self._heap), "a node is queued too late"


def pages_of(nodes: Iterable[CachedPrefix]) -> np.ndarray:
    """The own pages of nodes, one after the other, int32."""
    return np.concatenate([np.zeros(0, np.int32), *(node.own_page_ids for node in nodes)])
