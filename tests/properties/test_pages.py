"""The page pool agrees with a plain list of holders under any order of events."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_moe.scheduling.pages import PageAllocator
from tests.support.session.hypothesis_examples import examples


class PagesMachine(RuleBasedStateMachine):
    """Holders take pages, share some of each other's, and give back all or a part of theirs."""

    @initialize(num_pages=st.integers(2, 12))
    def set_up(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.holders: list[np.ndarray] = []
        self.generation_of: dict[int, int] = {}
        self.used_generations: set[int] = set()

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        counts, num_free = self.counts, self.allocator.num_free
        page_ids = self.allocator.allocate(count)
        if page_ids is None:
            assert count > num_free
            return
        assert page_ids.shape == (count,) and page_ids.dtype == np.int32
        assert counts.keys().isdisjoint(page_ids.tolist()), "a page in use was handed out"
        generations = self.allocator.generations[page_ids].tolist()
        assert self.used_generations.isdisjoint(generations) and len(set(generations)) == count
        self.used_generations.update(generations)
        self.generation_of |= dict(zip(page_ids.tolist(), generations, strict=True))
        self.holders.append(page_ids)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 1000), picks=st.lists(st.booleans(), min_size=6, max_size=6))
    def share(self, which, picks):
        holder = self.holders[which % len(self.holders)]
        shared = holder[np.array(picks[: len(holder)], np.bool_)]
        self.allocator.share(shared)
        self.holders.append(shared)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 1000), kept=st.integers(0, 6))
    def release(self, which, kept):
        index = which % len(self.holders)
        self.allocator.release(self.holders[index][kept:])
        self.holders[index] = self.holders[index][:kept]
        if not len(self.holders[index]):
            del self.holders[index]

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for holder in self.holders for page in holder.tolist())

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity(self.holders)
        counts = self.counts
        assert self.allocator.num_free == self.allocator.num_usable - len(counts)
        page_ids = np.array(list(counts), np.int32)
        assert self.allocator.references(page_ids).tolist() == list(counts.values())
        assert self.allocator.generations[page_ids].tolist() == [self.generation_of[page] for page in counts]

    def teardown(self):
        if hasattr(self, "allocator"):
            for holder in self.holders:
                self.allocator.release(holder)
            self.allocator.check_integrity([])
            assert self.allocator.num_free == self.allocator.num_usable


TestPages = PagesMachine.TestCase
TestPages.settings = examples(60, stateful_step_count=30)
