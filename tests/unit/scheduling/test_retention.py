"""Sessions and protections decide which cached pages leave first, within bounds that no client can widen."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.retention import Retention
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.prefix_tree import PrefixTree
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits, finish_session
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult

YEAR_S = 31_536_000.0
NUM_PAGES = 33
MAX_PROTECTED_S = 60.0
NUM_NAMES = 100_000


class Cache:
    """A tree with pages of one token, and its clock."""

    def __init__(self, *, max_protected: int = 8) -> None:
        self.allocator, self.now = PageAllocator(NUM_PAGES), 100.0
        self.tree = PrefixTree(self.allocator, page_size=1)
        self.tree.max_protected, self.tree.clock = max_protected, lambda: self.now

    def put(self, letters: str, owner: str | None = None, *, namespace: str = "") -> None:
        """Cache `letters` as a turn of a session, evicting what has to go."""
        ids = tokens(letters)
        prefix = self.tree.match(namespace, ids, owner=owner)
        self.tree.lock(prefix)
        if owner is not None:
            self.tree.order.supersede(prefix, owner)
        missing = len(ids) - prefix.num_pages
        self.tree.evict(missing - self.allocator.num_free)
        own = self.allocator.allocate(missing)
        assert own is not None
        self.tree.insert(namespace, ids, page_ids=np.concatenate([prefix.page_ids, own]), owner=owner)
        self.tree.unlock(prefix)
        self.allocator.release(own)
        self.tree.check_integrity()

    def cached(self, *prompts: str, namespace: str = "") -> list[int]:
        return [self.tree.match_length(namespace, tokens(letters)) for letters in prompts]


def tokens(letters: str) -> np.ndarray:
    return np.array([ord(letter) for letter in letters], np.int32)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_pages_of_an_ended_session_leave_first_and_shared_ones_in_their_turn(cache):
    cache.put("sys-one", "one")
    cache.put("sys-two", "two")
    cache.tree.order.finish("two")
    assert cache.tree.evict(3) == 3
    assert cache.cached("sys-one", "sys-two") == [7, 4]


def test_the_branch_that_an_edited_history_leaves_goes_first(cache):
    cache.put("abcdefgh", "one")
    cache.put("xyz")
    cache.put("abcd1234", "one")
    assert cache.tree.evict(4) == 4
    assert cache.cached("abcdefgh", "xyz", "abcd1234") == [4, 3, 8]


def test_a_branch_that_is_taken_up_again_or_used_by_others_stays(cache):
    for letters in ("abcdef", "abc123", "abcdef"):
        cache.put(letters, "one")
    assert cache.tree.evict(3) == 3 and cache.cached("abcdef", "abc123") == [6, 3]
    cache.put("abcdef")
    cache.put("abcxyz", "one")
    assert cache.tree.evict(3) == 3 and cache.cached("abcdef", "abcxyz") == [3, 6], "by last use"


def test_protected_pages_leave_last_until_their_time_is_over(cache):
    cache.put("kept")
    cache.tree.protect("", tokens("kept"), seconds=5)
    cache.put("later")
    cache.tree.evict(5)
    assert cache.cached("kept", "later") == [4, 0]
    cache.put("later")
    cache.now += 5
    cache.tree.evict(4)
    assert cache.cached("kept", "later") == [0, 5]


def test_a_full_share_takes_no_more_and_all_pages_can_still_leave():
    cache = Cache(max_protected=6)
    cache.put("first", "a", namespace="a")
    cache.tree.protect("a", tokens("first"), seconds=YEAR_S)
    cache.put("other", namespace="b")
    cache.tree.protect("b", tokens("other"), seconds=YEAR_S)
    cache.put("plain", namespace="b")
    assert cache.tree.evict(9) == 9
    assert cache.cached("first", namespace="a") == [5] and cache.cached("other", "plain", namespace="b") == [1, 0]
    assert cache.tree.num_evictable == 6 and cache.tree.evict(6) == 6
    cache.tree.check_integrity()


def test_a_full_share_leaves_the_rest_of_the_pool_to_others(cache):
    for letter in "abcdefgh":
        cache.put(letter * 2, namespace="greedy")
        cache.tree.protect("greedy", tokens(letter * 2), seconds=YEAR_S)
    quiet = "".join(map(chr, range(65, 65 + cache.allocator.num_usable - cache.tree.max_protected)))
    cache.put(quiet, namespace="quiet")
    assert cache.cached(quiet, namespace="quiet") == [len(quiet)]
    assert cache.cached(*(letter * 2 for letter in "abcdefgh"), namespace="greedy") == [2] * 4 + [0] * 4


def test_memory_depends_on_pages_and_not_on_names(cache):
    cache.put("shared", "a")
    for number in range(NUM_NAMES):
        cache.tree.order.finish(f"never seen {number}")
    for number in range(300):
        cache.put(chr(1000 + number) + "x", f"session {number}")
        cache.tree.protect("", tokens(chr(1000 + number) + "x"), seconds=YEAR_S)
        if number % 3 == 0:
            cache.tree.order.finish(f"session {number}")
    order = cache.tree.order
    assert len(order._owned) <= NUM_PAGES and order.num_protected <= cache.tree.max_protected
    for heap in (order._leaves, order._expiring):
        assert len(heap._heap) <= 2 * NUM_PAGES + heap.SLACK


def limits(*, num_rows: int = 4, **fields) -> StepLimits:
    return StepLimits(num_rows, 64, 64, 1, NUM_PAGES, max_tokens=64, **fields)


def served(scheduler: Scheduler, letters: str, **fields) -> None:
    """Serve a request of one new token to its end."""
    added(scheduler, letters, **fields)
    step(scheduler)


def added(scheduler: Scheduler, letters: str, *, n: int = 1, **fields) -> list[Sequence]:
    """Queue a request of `n` choices of one new token."""
    request = GenerationRequest(f"r {letters}", tokens(letters), SamplingParams(max_new_tokens=1, n=n), **fields)
    choices = [Sequence(request, i, seed=0, stop_token_ids=frozenset()) for i in range(n)]
    scheduler.add(choices)
    return choices


def step(scheduler: Scheduler) -> None:
    """Compute a step, and release what ends."""
    commit(scheduler, scheduler.schedule())


def commit(scheduler: Scheduler, schedule: Schedule) -> None:
    """Return the results of a step, and release what ends."""
    count = int(schedule.plan.chunks.samples.sum())
    ids, ranks = np.full(count, 7, np.int32), np.ones(count, np.int32)
    _, ended = scheduler.commit(schedule, StepResult(schedule.plan.step_id, ids, np.zeros(count, np.float32), ranks))
    for sequence in ended:
        scheduler.release(sequence)
    scheduler.check_integrity()


def test_a_year_lasts_as_long_as_the_setting_allows():
    scheduler = Scheduler(limits(protected_share=0.5, max_protected_s=MAX_PROTECTED_S))
    tree, now = scheduler.ranks[0].tree, 0.0
    tree.clock = lambda: now
    served(scheduler, "kept", retention=Retention(((64, YEAR_S),)))
    served(scheduler, "later")
    now = MAX_PROTECTED_S - 1
    tree.evict(5)
    assert [tree.match_length(("",), tokens(letters)) for letters in ("kept", "later")] == [4, 0]
    now = MAX_PROTECTED_S
    served(scheduler, "later")
    tree.evict(4)
    assert [tree.match_length(("",), tokens(letters)) for letters in ("kept", "later")] == [0, 5]


@pytest.mark.parametrize("is_on", [True, False])
def test_settings_turn_sessions_and_protections_off(is_on):
    scheduler = Scheduler(
        limits(evicts_by_session=is_on, protected_share=0.5 * is_on, max_protected_s=MAX_PROTECTED_S),
    )
    tree = scheduler.ranks[0].tree
    served(scheduler, "kept", retention=Retention(((64, YEAR_S),)))
    served(scheduler, "plain")
    served(scheduler, "ended", session="s", retention=Retention(ends_session=True))
    tree.evict(5)
    assert tree.match_length(("",), tokens("ended")) == (0 if is_on else 5)
    tree.evict(4)
    assert tree.match_length(("",), tokens("kept")) == (4 if is_on else 0)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_session_that_ends_before_its_request_leaves_first(is_running):
    scheduler = Scheduler(limits(evicts_by_session=True))
    served(scheduler, "plain")
    added(scheduler, "ended", session="s")
    if is_running:
        schedule = scheduler.schedule()
        finish_session(scheduler, "s")
        commit(scheduler, schedule)
    else:
        finish_session(scheduler, "s")
        step(scheduler)
    scheduler.ranks[0].tree.evict(5)
    matched = [scheduler.ranks[0].tree.match_length(("",), tokens(letters)) for letters in ("plain", "ended")]
    assert matched == [5, 0]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
def test_a_prompt_is_protected_until_its_last_choice_has_started(aborts, is_split):
    scheduler = Scheduler(limits(num_rows=1, protected_share=0.5, max_protected_s=MAX_PROTECTED_S))
    tree = scheduler.ranks[0].tree
    served(scheduler, "other")
    groups = [added(scheduler, "prompt") for _ in range(3)] if is_split else [added(scheduler, "prompt", n=3)]
    choices = [choice for group in groups for choice in group]
    for place in range(3):
        tree.match(("",), tokens("other"))
        assert tree.order.num_protected == (6 if place else 0)
        if place == 1:
            assert tree.evict(4) == 4 and tree.match_length(("",), tokens("prompt")) == 6
        if place == 2 and aborts:
            scheduler.end(choices[2], FinishReason("abort"))
            scheduler.release(choices[2])
        else:
            step(scheduler)
    assert all(choice.finish for choice in choices) and tree.order.num_protected == 0
    assert [choice.cache.num_cached for choice in choices] == [0, 5, 0 if aborts else 5]


def test_a_group_is_pinned_for_as_long_as_its_last_request_waits_and_apart_from_others():
    scheduler = Scheduler(limits(num_rows=1, protected_share=0.5, max_protected_s=MAX_PROTECTED_S))
    tree, now = scheduler.ranks[0].tree, 0.0
    tree.clock = lambda: now
    served(scheduler, "other")
    added(scheduler, "prompt")
    waiting = added(scheduler, "prompt")
    added(scheduler, "prompt", cache_salt="other")
    step(scheduler)
    now = YEAR_S
    tree.match(("",), tokens("other"))
    assert tree.evict(5) == 5 and tree.match_length(("",), tokens("prompt")) == 6
    scheduler.end(waiting[0], FinishReason("abort"))
    scheduler.release(waiting[0])
    step(scheduler)
    assert tree.order.num_protected == 0
    assert [tree.match_length((salt,), tokens("prompt")) for salt in ("", "other")] == [6, 6]


def test_the_end_of_a_pin_leaves_protections_in_force(cache):
    cache.put("kept")
    cache.tree.protect("", tokens("ke"), seconds=5)
    cache.tree.protect("", tokens("kept"), holder="group")
    cache.put("later")
    cache.tree.order.unpin(cache.tree.match("", tokens("kept")).path_up(), "group")
    cache.tree.evict(7)
    assert cache.cached("kept", "later") == [2, 0]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_branch_that_a_session_leaves_goes_before_older_pages(is_on):
    scheduler = Scheduler(limits(evicts_by_session=is_on))
    served(scheduler, "plain")
    served(scheduler, "abcdefgh", session="s")
    served(scheduler, "abcd12", session="s")
    scheduler.ranks[0].tree.evict(4)
    prompts = ("plain", "abcdefgh", "abcd12")
    matched = [scheduler.ranks[0].tree.match_length(("",), tokens(letters)) for letters in prompts]
    assert matched == ([5, 4, 6] if is_on else [1, 8, 6])
