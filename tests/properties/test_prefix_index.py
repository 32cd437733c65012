"""A router's index of cached pages equals what the prefix trees of the replicas hold, whenever all events have come.

Engines insert, evict, clear and lock; messages are lost, replicas restart, readers start over from a snapshot. The
trees' contents are read by a walk that knows neither events nor digests of the log.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from rayserve_moe.fleet.page_log import EVENTS, PageLog
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.scheduling import page_digests
from rayserve_moe.scheduling.page_digests import prompt_digests, root_digest
from rayserve_moe.scheduling.page_events import PageEvents, PagesCleared, PagesRemoved, WeightsNamed
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree
from tests.support.session.hypothesis_examples import examples

KEY = b"k" * 32
PAGE = 2
NUM_PAGES = 12
NUM_RANKS = 2
NUM_REPLICAS = 2
NAMESPACES = (("",), ("salt",), "private request")

letters = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
namespaces = st.sampled_from((*NAMESPACES, *NAMESPACES[:1] * 3))
replicas = st.integers(0, NUM_REPLICAS - 1)
ranks = st.integers(0, NUM_RANKS - 1)


class Engine:
    """Trees of some ranks, their log, and messages that a reader has not got yet."""

    def __init__(self, log=PageLog):
        self.allocators = [PageAllocator(NUM_PAGES) for _ in range(NUM_RANKS)]
        self.trees = [PrefixTree(allocator, page_size=PAGE) for allocator in self.allocators]
        self.locks = []
        self.num_wakes = 0
        self.events = PageEvents(self.wake)
        self.version = "0"
        self.events.record(0, WeightsNamed("0"))
        for rank, tree in enumerate(self.trees):
            tree.watch(partial(self.events.record, rank))
        self.log = log(KEY, num_data_ranks=NUM_RANKS, num_pages=NUM_PAGES, page_size=PAGE)
        self.sent = []

    def wake(self):
        self.num_wakes += 1

    def insert(self, namespace, run, rank, *, locks):
        tree, allocator = self.trees[rank], self.allocators[rank]
        token_ids = tokens(run)
        prefix = tree.match(namespace, token_ids)
        tree.lock(prefix)
        missing = len(run) - prefix.num_pages
        if allocator.num_free < missing:
            tree.evict(missing - allocator.num_free)
        computed = allocator.allocate(missing)
        if computed is None:
            tree.unlock(prefix)
            return
        page_ids = np.concatenate([prefix.page_ids, computed])
        longer = tree.insert(namespace, token_ids, page_ids=page_ids)
        tree.lock(longer)
        tree.unlock(prefix)
        allocator.release(computed)
        if locks:
            self.locks.append((tree, longer))
        else:
            tree.unlock(longer)

    def publish(self):
        self.sent.append(self.log.publish(self.events.take(1 << 10)))


class IndexMachine(RuleBasedStateMachine):
    """Several replicas and one index; `log` may be a damaged one."""

    log = PageLog

    @initialize()
    def set_up(self):
        self.engines = [Engine(self.log) for _ in range(NUM_REPLICAS)]
        self.index = PrefixIndex()
        self.index.follow(names())
        self.wants_snapshot = [True] * NUM_REPLICAS

    @rule(
        which=replicas,
        namespace=namespaces,
        prompts=st.lists(letters, min_size=1, max_size=3),
        rank=ranks,
        locks=st.booleans(),
    )
    def serve(self, which, namespace, prompts, rank, locks):
        for run in prompts:
            self.engines[which].insert(namespace, run, rank, locks=locks)

    @rule(which=replicas, count=st.integers(1, 4))
    def evict(self, which, count):
        for tree in self.engines[which].trees:
            tree.evict(count)

    @rule(which=replicas, namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, which, namespace):
        for tree in self.engines[which].trees:
            tree.clear(namespace)

    @rule(which=replicas)
    def change_weights(self, which):
        engine = self.engines[which]
        engine.version = str(int(engine.version) + 1)
        engine.events.record(0, WeightsNamed(engine.version))
        for tree in engine.trees:
            tree.clear()

    @rule(which=replicas)
    def unlock(self, which):
        engine = self.engines[which]
        for tree, prefix in engine.locks:
            tree.unlock(prefix)
        engine.locks = []

    @rule(which=replicas)
    def publish(self, which):
        self.engines[which].publish()

    @rule(which=replicas, lost=st.integers(0, 3))
    def lose_message(self, which, lost):
        sent = self.engines[which].sent
        if sent:
            del sent[lost % len(sent)]

    @rule(which=replicas)
    def restart(self, which):
        """A replica starts again under its name; what its predecessor had sent still comes."""
        before = self.engines[which].sent
        self.engines[which] = Engine(self.log)
        self.engines[which].sent = before

    @rule(which=replicas)
    def replace_reader(self, which):
        """The recorder starts over in the middle: what the trees hold is recorded first."""
        engine = self.engines[which]
        engine.events.take(1 << 10)
        engine.log = self.log(KEY, num_data_ranks=NUM_RANKS, num_pages=NUM_PAGES, page_size=PAGE)
        engine.events.record(0, WeightsNamed(engine.version))
        for rank, tree in enumerate(engine.trees):
            tree.watch(partial(engine.events.record, rank))

    @rule(which=replicas)
    def deliver_some(self, which):
        sent = self.engines[which].sent
        if sent:
            self._receive(which, sent.pop(0))

    @rule(run=letters, namespace=st.sampled_from(NAMESPACES[:2]))
    def become_quiet(self, run, namespace):
        """All events come, and snapshots where they are asked for: then index and trees agree."""
        for which, engine in enumerate(self.engines):
            engine.publish()
            while engine.sent:
                self._receive(which, engine.sent.pop(0))
            if self.wants_snapshot[which]:
                for part in engine.log.snapshot():
                    self._receive(which, part)
            name = names()[which]
            assert self.index.is_known(name)
            assert self.index.weight_version(name) == engine.version
            assert self.index.digests_of(name) == held_digests(engine)
            self._prompts_agree(engine, name, run, namespace)

    @invariant()
    def memory_is_bounded(self):
        if hasattr(self, "index"):
            assert len(self.index) <= NUM_REPLICAS * NUM_RANKS * (NUM_PAGES - 1)

    def _prompts_agree(self, engine, name, run, namespace):
        """A prompt finds as many pages by the index as the best tree would find for it, and never its last token."""
        for token_ids in (tokens(run), np.append(tokens(run), np.int32(9))):
            digests = prompt_digests(KEY, namespace[0], token_ids=token_ids, page_size=PAGE)
            found = max(tree.match_length(namespace, token_ids[: max(len(token_ids) - 1, 0)]) for tree in engine.trees)
            assert self.index.num_cached_pages(name, digests) * PAGE == found

    def _receive(self, which, message):
        is_whole = self.index.apply(names()[which], message)
        if message.num_to_come in (EVENTS, 0):
            self.wants_snapshot[which] = not is_whole


def names():
    return [f"replica {which}" for which in range(NUM_REPLICAS)]


def tokens(run) -> np.ndarray:
    return np.array([[letter // 2] * (PAGE - 1) + [letter] for letter in run], np.int32).reshape(-1)


def held_digests(engine):
    """What the trees hold for others to find, named anew page by page from the root."""
    held = {}
    for rank, tree in enumerate(engine.trees):
        found = set()
        for node in tree._root.below():
            top = [*node.path_up()][-1]
            if isinstance(top.key[0], tuple):
                whole = b"".join(above.run for above in reversed([*node.path_up()]))
                found |= set(named(top.key[0][0], whole))
        if found:
            held[rank] = found
    return held


def named(salt, run):
    above = root_digest(KEY, salt)
    for start in range(0, len(run), 4 * PAGE):
        (above,) = page_digests.chained_digests(KEY, above, run=run[start : start + 4 * PAGE], page_bytes=4 * PAGE)
        yield above


TestPrefixIndex = IndexMachine.TestCase
TestPrefixIndex.settings = examples(150, stateful_step_count=30)


class LosesRemoves(PageLog):
    def publish(self, changes):
        kept = [(rank, change) for rank, change in changes if not isinstance(change, PagesRemoved)]
        return super().publish(kept)


class KeepsLockedPages(PageLog):
    """Reports a clear only once the pages would be freed: here, never."""

    def publish(self, changes):
        return super().publish([each for each in changes if not isinstance(each[1], PagesCleared)])


class PublishesPrivatePages(PageLog):
    def publish(self, changes):
        def public(change):
            is_private = isinstance(getattr(change, "namespace", None), str)
            return change._replace(namespace=(change.namespace,)) if is_private else change

        return super().publish([(rank, public(change)) for rank, change in changes])


class ForgetsSalts(PageLog):
    def publish(self, changes):
        def unsalted(change):
            salted = isinstance(getattr(change, "namespace", None), tuple)
            return change._replace(namespace=("",)) if salted else change

        return super().publish([(rank, unsalted(change)) for rank, change in changes])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [LosesRemoves, KeepsLockedPages, PublishesPrivatePages, ForgetsSalts])
def test_the_law_finds_a_planted_fault(fault):
    class Damaged(IndexMachine):
        log = fault

    quickly = settings(max_examples=2000, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Damaged, settings=quickly)
