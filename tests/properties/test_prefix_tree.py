"""The prefix tree agrees with a dictionary of cached prefixes under any order of events.

The model has no tree. It holds a page, a time of last use, an owner and a protection for every cached prefix of whole
pages. Of the prefixes without a longer prefix or a lock, it drops released ones first and protected ones last, each by
last use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree
from tests.support.session.hypothesis_examples import examples

NAMESPACES = ("", "salt", ("salt", 7))
SESSIONS = (None, "one", "two")
MOST_HOLDERS = 8
USES_BETWEEN_CLEARS = 6

Prefix = tuple[object, tuple[int, ...]]
"""A namespace and page letters: the model's name of what one page stands for."""

# Few letters and mostly one namespace, so that prompts meet; all bits matter, so that long runs are as likely as short.
letters = st.integers(0, 3**7 - 1).map(lambda bits: tuple(bits // 3**n % 3 for n in range(bits % 7)))
namespaces = st.sampled_from((*NAMESPACES, *NAMESPACES[:1] * 4))
sessions = st.sampled_from(SESSIONS)
which_one = st.integers(0, 1000)


@dataclass
class Cached:
    page: int
    last_used: int
    owner: str | None
    is_released: bool = False
    protected_until: float = 0.0
    pins: frozenset[Prefix] = frozenset()
    """Prompts that pin it."""

    @property
    def turn(self) -> tuple[int, int]:
        """Return the place in the order of eviction."""
        return 2 if self.is_protected else 0 if self.is_released else 1, self.last_used

    @property
    def is_protected(self) -> bool:
        return bool(self.protected_until or self.pins)


@dataclass
class Holder:
    """Somebody who computes `letters`: references to `page_ids`, and a lock on a prefix of them."""

    namespace: object
    letters: tuple[int, ...]
    page_ids: np.ndarray
    prefix: CachedPrefix
    num_clears: int
    """How often its namespace had been cleared when it started."""
    owner: str | None


class PrefixTreeMachine(RuleBasedStateMachine):
    """Holders come with a prompt, cache what they computed, fork, finish and abort, in a pool that is too small."""

    @initialize(num_pages=st.sampled_from([4, 9, 17, 41]), page_size=st.integers(1, 3))
    def set_up(self, num_pages, page_size):
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.max_protected, self.now = num_pages // 2, 1.0
        self.tree = PrefixTree(self.allocator, page_size=page_size)
        self.tree.max_protected, self.tree.clock = self.max_protected, lambda: self.now
        self.holders: list[Holder] = []
        self.cached: dict[Prefix, Cached] = {}
        self.num_clears = dict.fromkeys(NAMESPACES, 0)
        self.clock = 0
        self.next_clear = USES_BETWEEN_CLEARS

    @rule(namespace=namespaces, prompts=st.lists(letters, min_size=1, max_size=4), owner=sessions)
    def serve(self, namespace, prompts, owner):
        """Several come one after the other, and leave what they computed in the cache."""
        for letters in prompts:
            holder = self._admit(namespace, letters, owner)
            if holder is not None:
                self.books_are_right()
                self._insert(holder, len(letters))
                self._let_go(holder)

    @precondition(lambda self: len(self.holders) < MOST_HOLDERS)
    @rule(
        namespace=namespaces,
        prompts=st.lists(letters, min_size=2, max_size=4),
        progress=st.integers(0, 6),
        owner=sessions,
    )
    def start(self, namespace, prompts, progress, owner):
        """Several come at once, and cache their first pages while they go on."""
        holders = [self._admit(namespace, letters, owner) for letters in prompts]
        for holder in holders:
            if holder is not None:
                self._progress(holder, progress)
                self.books_are_right()

    @precondition(lambda self: self.holders)
    @rule(which=which_one, progress=st.integers(0, 6))
    def progress(self, which, progress):
        self._progress(self.holders[which % len(self.holders)], progress)

    @precondition(lambda self: self.holders)
    @rule(which=which_one, is_aborted=st.booleans())
    def end(self, which, is_aborted):
        holder = self.holders[which % len(self.holders)]
        if not is_aborted:
            self._progress(holder, len(holder.letters))
        self._let_go(holder)

    @precondition(lambda self: 0 < len(self.holders) < MOST_HOLDERS)
    @rule(which=which_one)
    def fork(self, which):
        """Somebody else starts from the same locked prefix, even where it was cleared meanwhile."""
        leader = self.holders[which % len(self.holders)]
        self.tree.lock(leader.prefix)
        page_ids = leader.prefix.page_ids.copy()
        self.allocator.share(page_ids)
        letters = leader.letters[: len(page_ids)]
        self.holders.append(replace(leader, letters=letters, page_ids=page_ids))

    @rule(namespace=namespaces, letters=letters, owner=sessions)
    def look(self, namespace, letters, owner):
        self._match(namespace, letters, owner)

    @rule(namespace=namespaces, letters=letters, seconds=st.integers(0, 4))
    def protect(self, namespace, letters, seconds):
        """Protect the first pages of a prompt up to the limit, and protected pages for longer."""
        self.tree.protect(namespace, self._tokens(letters), seconds=seconds)
        self._expire()
        for n in range(1, len(letters) + 1):
            page = self.cached.get((namespace, letters[:n]))
            if page is None or not (page.is_protected or self._num_protected() < self.max_protected):
                break
            page.is_released, page.protected_until = False, max(page.protected_until, self.now + seconds)

    @rule(namespace=namespaces, letters=letters)
    def pin(self, namespace, letters):
        """The first pages of a prompt are pinned, as many as may be protected."""
        self.tree.protect(namespace, self._tokens(letters), holder=(namespace, letters))
        self._expire()
        for n in range(1, len(letters) + 1):
            page = self.cached.get((namespace, letters[:n]))
            if page is None or not (page.is_protected or self._num_protected() < self.max_protected):
                break
            page.pins |= {(namespace, letters)}

    @precondition(lambda self: any(page.pins for page in self.cached.values()))
    @rule(which=which_one)
    def unpin(self, which):
        """The pins of a prompt end, and nothing else."""
        held = sorted({holder for page in self.cached.values() for holder in page.pins}, key=repr)
        namespace, letters = held[which % len(held)]
        self.tree.order.unpin(self._match(namespace, letters, None).path_up(), (namespace, letters))
        for page in self.cached.values():
            page.pins -= {(namespace, letters)}

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds):
        self.now += seconds

    @rule(owner=sessions)
    def finish(self, owner):
        self.tree.order.finish(owner)
        self._release(page for page in self.cached.values() if page.owner == owner is not None)

    @rule(namespace=namespaces, letters=letters, owner=st.sampled_from(SESSIONS[1:]))
    def supersede(self, namespace, letters, owner):
        """Release the branches that leave a path after a page of their owner, except branches in use."""
        prefix = self._match(namespace, letters, owner)
        self.tree.order.supersede(prefix, owner)
        path = [letters[:n] for n in range(1, prefix.num_pages + 1)]
        own = [run for run in path if self.cached[namespace, run].owner == owner]
        locked = self._locked()
        self._release(
            page
            for (space, run), page in self.cached.items()
            if own and space == namespace and run[: len(own[0])] == own[0]
            if run not in path and (space, run) not in locked
        )

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages):
        self._evict(num_pages)

    @precondition(lambda self: self.clock >= self.next_clear)
    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, namespace):
        self.next_clear = self.clock + USES_BETWEEN_CLEARS
        self.tree.clear(namespace)
        for cleared in NAMESPACES if namespace is None else [namespace]:
            self.num_clears[cleared] += 1
            self.cached = {key: value for key, value in self.cached.items() if key[0] != cleared}

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        self.allocator.check_integrity([self.tree.held_page_ids(), *(holder.page_ids for holder in self.holders)])
        assert self.tree.num_cached_pages == len(self.cached)
        assert self.tree.num_evictable == len(self.cached.keys() - self._locked())
        assert self.tree.order.num_protected == self._num_protected() <= self.max_protected
        for namespace, run in self.cached:
            assert self.tree.match_length(namespace, self._tokens(run)) == len(run) * self.page_size

    def teardown(self):
        if not hasattr(self, "tree"):
            return
        for holder in list(self.holders):
            self._let_go(holder)
        self.books_are_right()
        assert self.allocator.num_free + self.tree.num_evictable == self.allocator.num_usable, "pages are lost"
        self._evict(self.tree.num_evictable)
        assert self.allocator.num_free == self.allocator.num_usable, "pages are lost"

    def _match(self, namespace, run, owner) -> CachedPrefix:
        length = next(n for n in range(len(run), -1, -1) if n == 0 or (namespace, run[:n]) in self.cached)
        wanted = np.append(self._tokens(run), np.arange(self.page_size - 1, dtype=np.int32))
        assert self.tree.match_length(namespace, wanted) == length * self.page_size
        prefix = self.tree.match(namespace, wanted, owner=owner)
        assert prefix.num_pages == length
        self._expect_pages(prefix, namespace, run[:length])
        self._use(namespace, run[:length], owner)
        return prefix

    def _admit(self, namespace, letters, owner) -> Holder | None:
        prefix = self._match(namespace, letters, owner)
        self.tree.lock(prefix)
        holder = Holder(namespace, letters, prefix.page_ids.copy(), prefix, self.num_clears[namespace], owner)
        self.allocator.share(prefix.page_ids)
        self.holders.append(holder)
        missing = len(letters) - len(prefix.page_ids)
        if self.allocator.num_free < missing:
            self._evict(missing - self.allocator.num_free)
        computed = self.allocator.allocate(missing)
        if computed is None:
            assert self.tree.num_evictable == 0, "there was room to be made"
            self._let_go(holder)
            return None
        holder.page_ids = np.concatenate([holder.page_ids, computed])
        return holder

    def _progress(self, holder: Holder, progress: int) -> None:
        """Cache what a holder has computed by now, unless it started before its namespace was cleared."""
        if holder.num_clears == self.num_clears[holder.namespace]:
            least = holder.prefix.num_pages
            self._insert(holder, min(max(progress, least), len(holder.letters)))

    def _insert(self, holder: Holder, num_pages: int) -> None:
        run, owner, page_ids = holder.letters[:num_pages], holder.owner, holder.page_ids[:num_pages]
        prefix = self.tree.insert(holder.namespace, self._tokens(run), page_ids=page_ids, owner=owner)
        for n in range(1, num_pages + 1):
            self.cached.setdefault((holder.namespace, run[:n]), Cached(int(page_ids[n - 1]), 0, owner))
        self._expect_pages(prefix, holder.namespace, run)
        self._use(holder.namespace, run, owner)
        self.tree.lock(prefix)
        self.tree.unlock(holder.prefix)
        holder.prefix = prefix

    def _let_go(self, holder: Holder) -> None:
        self.holders = [other for other in self.holders if other is not holder]
        self.tree.unlock(holder.prefix)
        self.allocator.release(holder.page_ids)

    def _evict(self, num_pages: int) -> None:
        locked, num_free = self._locked(), self.allocator.num_free
        num_evictable = len(self.cached.keys() - locked)
        assert self.tree.evict(num_pages) == min(num_pages, num_evictable)
        assert self.allocator.num_free == num_free + min(num_pages, num_evictable)
        self._expire()
        for _ in range(min(num_pages, num_evictable)):
            continued = {(namespace, run[:-1]) for namespace, run in self.cached}
            leaves = self.cached.keys() - locked - continued
            del self.cached[min(leaves, key=lambda key: self.cached[key].turn)]

    def _use(self, namespace, run, owner) -> None:
        self.clock += 1
        for n in range(1, len(run) + 1):
            page = self.cached[namespace, run[:n]]
            page.last_used, page.is_released = self.clock, False
            page.owner = owner if page.owner == owner else None

    def _expire(self) -> None:
        for page in self.cached.values():
            if page.protected_until <= self.now:
                page.protected_until = 0.0

    def _release(self, pages) -> None:
        for page in pages:
            page.is_released, page.protected_until = True, 0.0

    def _num_protected(self) -> int:
        return sum(page.is_protected for page in self.cached.values())

    def _locked(self) -> set[Prefix]:
        """Every cached prefix on the way to a locked one."""
        return {
            (holder.namespace, holder.letters[:n])
            for holder in self.holders
            if holder.num_clears == self.num_clears[holder.namespace]
            for n in range(1, holder.prefix.num_pages + 1)
        }

    def _expect_pages(self, prefix: CachedPrefix, namespace, run) -> None:
        expected = [self.cached[namespace, run[:n]].page for n in range(1, len(run) + 1)]
        assert prefix.page_ids.tolist() == expected

    def _tokens(self, run) -> np.ndarray:
        """Token ids of page letters; letters 0 and 1 differ in the last token of a page only."""
        pages = [[letter // 2] * (self.page_size - 1) + [letter] for letter in run]
        return np.array(pages, np.int32).reshape(-1)


TestPrefixTree = PrefixTreeMachine.TestCase
TestPrefixTree.settings = examples(100, stateful_step_count=40)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda tree, leaf: setattr(tree, "num_evictable", 9), "evictable pages are miscounted"),
        (lambda tree, leaf: setattr(tree, "num_cached_pages", 9), "cached pages are miscounted"),
        (lambda tree, leaf: setattr(leaf, "num_locks", 1), "locks are miscounted"),
        (lambda tree, leaf: setattr(leaf, "parent", tree._root), "a node is not a child of its parent"),
        (lambda tree, leaf: setattr(leaf, "run", leaf.run[:-4]), "tokens and pages"),
        (lambda tree, leaf: setattr(leaf, "num_pages", 9), "the pages of a node are miscounted"),
        (lambda tree, leaf: setattr(leaf, "run", leaf.run[::-1]), "a node has a wrong key"),
        (lambda tree, leaf: setattr(leaf, "last_used", 99), "a node was used without its parent"),
        (lambda tree, leaf: tree.order._leaves._heap.clear(), "lost its entry"),
        (lambda tree, leaf: tree.order.pop(), "not queued"),
        (lambda tree, leaf: tree.order._leaves.add(CachedPrefix(parent=leaf)), "queued after its end"),
        (lambda tree, leaf: setattr(leaf, "is_released", True), "queued, or too late"),
        (lambda tree, leaf: tree.order.protect([leaf], until=2.0), "hangs free"),
        (lambda tree, leaf: setattr(leaf.parent, "protected_until", 2.0), "protected pages are miscounted"),
        (lambda tree, leaf: setattr(leaf, "owner", "one"), "owners are wrong"),
        (lambda tree, leaf: tree.order._owned.update(two={}), "an owner without pages"),
        (lambda tree, leaf: setattr(leaf, "own_page_ids", leaf.parent.own_page_ids), "cached pages are miscounted"),
        (lambda tree, leaf: tree._allocator.release(leaf.own_page_ids), "without a reference"),
    ],
)
def test_the_check_after_every_rule_finds_what_is_wrong(damage, complaint):
    allocator = PageAllocator(4)
    tree = PrefixTree(allocator, page_size=1)
    page_ids = allocator.allocate(2)
    for length in (1, 2):
        tree.insert("", np.array([5, 6][:length]), page_ids=page_ids[:length])
    allocator.release(page_ids)
    tree.check_integrity()
    damage(tree, tree.match("", np.array([5, 6])))
    with pytest.raises(AssertionError, match=complaint):
        tree.check_integrity()
