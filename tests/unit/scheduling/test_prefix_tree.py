"""The prefix cache finds whole pages, keeps what is locked, and drops the least recently used."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.scheduling.eviction_order import CachedPrefix
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree

PAGE = 2
"""Tokens per page."""


class Cache:
    """A tree and the pool under it. A letter stands for one page of tokens, most of which differ in the last only."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(33)
        self.tree = PrefixTree(self.allocator, page_size=PAGE)

    @property
    def num_held(self) -> int:
        return self.allocator.num_usable - self.allocator.num_free

    def put(self, letters: str, *, namespace: object = "") -> np.ndarray:
        """Cache `letters` in pages that nobody else holds afterwards; returns the pages that the tree has for them."""
        own = self.take(len(letters))
        page_ids = self.tree.insert(namespace, tokens(letters), page_ids=own).page_ids
        self.allocator.release(own)
        self.check()
        return page_ids

    def take(self, count: int) -> np.ndarray:
        page_ids = self.allocator.allocate(count)
        assert page_ids is not None
        return page_ids

    def match(self, letters: str, *, namespace: object = "") -> CachedPrefix:
        prefix = self.tree.match(namespace, tokens(letters))
        self.check()
        return prefix

    def lock(self, letters: str) -> CachedPrefix:
        prefix = self.match(letters)
        assert prefix.num_pages == len(letters)
        self.tree.lock(prefix)
        self.check()
        return prefix

    def cached(self, *prompts: str, namespace: object = "") -> list[int]:
        """How many pages of each prompt are cached."""
        return [self.tree.match_length(namespace, tokens(letters)) // PAGE for letters in prompts]

    def check(self) -> None:
        self.tree.check_integrity()
        self.allocator.check_integrity([self.tree.held_page_ids()])


def tokens(letters: str) -> np.ndarray:
    return np.array([[ord(letter) // 32, ord(letter)] for letter in letters], np.int32).reshape(-1)


@pytest.fixture
def cache():
    cache = Cache()
    yield cache
    cache.check()


def test_the_empty_prefix_is_a_prefix(cache):
    prefix = cache.match("ABC")
    assert prefix.num_pages == 0 and prefix.page_ids.shape == (0,) and prefix.page_ids.dtype == np.int32
    assert len(cache.put("")) == 0 and cache.tree.num_cached_pages == 0
    cache.tree.lock(prefix)
    cache.put("A")
    cache.tree.clear()
    cache.tree.unlock(prefix)
    assert cache.tree.evict(1) == 0


def test_a_match_is_the_longest_run_of_whole_pages(cache):
    page_ids = cache.put("ABC")
    assert page_ids.dtype == np.int32
    for letters, num_pages in (("ABC", 3), ("ABCD", 3), ("ABD", 2), ("AAC", 1), ("BBC", 0), ("", 0)):
        assert cache.cached(letters) == [num_pages]
        prefix = cache.match(letters)
        np.testing.assert_array_equal(prefix.page_ids, page_ids[:num_pages])
        assert prefix.num_pages == num_pages


@pytest.mark.parametrize("length", range(7))
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_part_of_a_page_never_counts(cache, length, dtype):
    cache.put("ABC")
    prompt = tokens("ABC")[:length].astype(dtype)
    assert cache.tree.match_length("", prompt) == length // PAGE * PAGE
    assert cache.tree.match("", prompt).num_pages == length // PAGE


def test_where_a_run_is_cached_already_the_tree_keeps_its_own_pages(cache):
    first = cache.put("ABC")
    second = cache.put("ABDE")
    np.testing.assert_array_equal(second[:2], first[:2])
    assert set(second[2:]).isdisjoint(first)
    np.testing.assert_array_equal(cache.put("AB"), first[:2])
    np.testing.assert_array_equal(cache.match("ABC").page_ids, first)
    np.testing.assert_array_equal(cache.match("ABDE").page_ids, second)
    assert cache.tree.num_cached_pages == 5


def test_the_tree_takes_a_reference_to_new_pages_only(cache):
    cached, own = cache.put("AB"), cache.take(3)
    cache.tree.insert("", tokens("ABC"), page_ids=own)
    assert cache.allocator.references(own).tolist() == [1, 1, 2]
    assert cache.allocator.references(cached).tolist() == [1, 1]
    cache.allocator.release(own)


def test_what_was_handed_to_the_tree_may_change_afterwards(cache):
    letters, own = tokens("AB"), cache.take(2)
    prefix = cache.tree.insert("", letters, page_ids=own)
    cached = prefix.page_ids.copy()
    cache.allocator.release(own)
    letters[:], own[:], prefix.page_ids[:] = 0, 0, 0
    np.testing.assert_array_equal(cache.match("AB").page_ids, cached)


def test_only_whole_pages_are_inserted(cache):
    with pytest.raises(AssertionError, match="whole pages"):
        cache.tree.insert("", tokens("AB")[:-1], page_ids=np.array([1, 2], np.int32))


@pytest.mark.parametrize("namespaces", [("a", "b"), (None, ""), (("salt", 1), ("salt", 2)), (0, "0")])
def test_namespaces_never_see_each_other(cache, namespaces):
    one, other = namespaces
    first = cache.put("AB", namespace=one)
    assert cache.cached("AB", namespace=other) == [0]
    second = cache.put("AB", namespace=other)
    assert set(first).isdisjoint(second)
    np.testing.assert_array_equal(cache.match("AB", namespace=one).page_ids, first)
    np.testing.assert_array_equal(cache.match("AB", namespace=other).page_ids, second)


@pytest.mark.parametrize(
    ("use", "left"),
    [
        (Cache.match, [2, 0, 2]),
        (Cache.put, [2, 0, 2]),
        (Cache.cached, [0, 2, 2]),
        (lambda cache, letters: cache.tree.unlock(cache.lock(letters)), [2, 0, 2]),
    ],
    ids=["match", "insert", "match_length", "lock"],
)
def test_the_least_recently_used_goes_first(cache, use, left):
    for letters in ("AA", "BB", "CC"):
        cache.put(letters)
    use(cache, "AA")
    assert cache.tree.evict(2) == 2
    assert cache.cached("AA", "BB", "CC") == left


def test_a_leaf_loses_only_as_many_pages_as_needed_from_its_end(cache):
    page_ids = cache.put("ABCDE")
    assert cache.tree.evict(2) == 2
    np.testing.assert_array_equal(cache.match("ABCDE").page_ids, page_ids[:3])
    assert cache.tree.num_cached_pages == cache.tree.num_evictable == 3
    np.testing.assert_array_equal(cache.put("ABCXY")[:3], page_ids[:3])


def test_only_the_used_part_of_a_run_is_spared(cache):
    cache.put("ABCD")
    cache.put("XY")
    cache.match("ABQ")
    assert cache.tree.evict(2) == 2 and cache.cached("ABCD", "XY") == [2, 2]
    assert cache.tree.evict(2) == 2 and cache.cached("ABCD", "XY") == [2, 0]


def test_a_parent_goes_after_its_children(cache):
    for letters in ("AB", "ABC", "ABD"):
        cache.put(letters)
    assert cache.tree.evict(2) == 2 and cache.cached("ABC", "ABD") == [2, 2]
    assert cache.tree.evict(5) == 2 and cache.tree.num_cached_pages == cache.tree.evict(1) == 0


def test_what_is_locked_survives_and_what_hangs_below_it_does_not(cache):
    cache.put("ABCD")
    cache.put("XY")
    locked = cache.lock("AB")
    assert cache.tree.num_evictable == 4
    assert cache.tree.evict(100) == 4
    np.testing.assert_array_equal(cache.match("ABCD").page_ids, locked.page_ids)
    cache.tree.unlock(locked)
    assert cache.tree.evict(100) == 2
    assert cache.num_held == 0


def test_a_split_keeps_locks_on_both_parts(cache):
    cache.put("ABCD")
    locked = cache.lock("ABCD")
    cache.put("ABX")
    cache.match("A")
    assert cache.tree.num_evictable == cache.tree.evict(100) == 1
    cache.tree.unlock(locked)
    assert cache.tree.num_evictable == 4
    assert cache.tree.evict(3) == 3
    assert cache.cached("ABCD") == [1]


def test_locks_are_counted_and_taken_back_in_any_order(cache):
    cache.put("ABCD")
    short, long, middle, again = (cache.lock(letters) for letters in ("AB", "ABCD", "ABC", "ABCD"))
    cache.tree.unlock(long)
    assert cache.tree.evict(100) == 0
    cache.tree.unlock(again)
    assert cache.tree.evict(100) == 1
    cache.tree.unlock(short)
    assert cache.tree.evict(100) == 0
    cache.tree.unlock(middle)
    assert cache.tree.evict(100) == 3


def test_unlocking_without_a_lock_is_our_own_fault_and_says_so(cache):
    cache.put("AB")
    cache.lock("AB")
    with pytest.raises(AssertionError, match="more often"):
        cache.tree.unlock(cache.match("A"))


@pytest.mark.parametrize("lose", [lambda t: t.evict(1), lambda t: t.evict(2), PrefixTree.clear], ids=["1", "2", "all"])
def test_a_prefix_that_is_gone_cannot_be_locked(cache, lose):
    cache.put("AB")
    prefix = cache.match("AB")
    lose(cache.tree)
    cache.put("AB")
    with pytest.raises(AssertionError, match="evicted"):
        cache.tree.lock(prefix)


def test_pages_that_a_holder_shares_are_dropped_but_are_not_free(cache):
    page_ids = cache.put("AB")
    cache.allocator.share(page_ids[1:])
    assert cache.tree.evict(1) == 1 and cache.tree.num_cached_pages == 0
    cache.allocator.release(page_ids[1:])


def test_clearing_one_namespace_leaves_the_others(cache):
    for namespace in ("a", "b"):
        cache.put("ABC", namespace=namespace)
        cache.put("ABX", namespace=namespace)
    cache.tree.clear("a")
    assert cache.cached("ABC", "ABX", namespace="a") == [0, 0]
    assert cache.cached("ABC", "ABX", namespace="b") == [3, 3]
    cache.tree.clear()
    assert cache.tree.num_cached_pages == cache.tree.num_evictable == cache.num_held == 0


def test_a_locked_path_outlives_clear_unseen_and_goes_as_its_locks_do(cache):
    cache.put("ABCD")
    cache.put("ABX")
    short, long = cache.lock("AB"), cache.lock("ABCD")
    cache.tree.clear()
    assert cache.cached("ABCD", "ABX") == [0, 0]
    assert cache.tree.num_cached_pages == cache.tree.evict(100) == 0
    cache.tree.lock(short)
    assert cache.num_held == 4
    for prefix, num_held in ((short, 4), (long, 2), (short, 0)):
        cache.tree.unlock(prefix)
        assert cache.num_held == num_held


def test_the_same_prefix_can_be_cached_again_while_cleared_ones_wait(cache):
    waiting = []
    for _ in range(3):
        cache.put("AB")
        waiting.append(cache.lock("AB"))
        cache.tree.clear("")
    cache.put("AB")
    assert cache.num_held == 8
    for prefix in waiting:
        cache.tree.unlock(prefix)
    assert cache.cached("AB") == [2] and cache.num_held == 2


def test_use_leaves_nothing_behind(cache):
    for turn in range(100):
        cache.put("AB")
        cache.put("AB", namespace=turn)
        cache.tree.unlock(cache.lock("AB"))
        assert len(cache.tree.order._leaves._keys) == 1 + turn % 10 + 1
        if turn % 10 == 9:
            cache.tree.clear()
    assert not cache.tree._root.children and not cache.tree._cleared.children
    assert not cache.tree.order._leaves._heap


def test_a_page_holds_a_token():
    with pytest.raises(ValueError, match="at least 1 token"):
        PrefixTree(PageAllocator(2), page_size=0)
