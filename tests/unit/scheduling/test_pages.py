"""Pages are handed out once, shared by count, and never carry the same generation twice."""

from __future__ import annotations

import pytest

from rayserve_moe.scheduling.pages import NULL_PAGE, PageAllocator


def test_all_but_the_null_page_can_be_held_and_no_more():
    allocator = PageAllocator(5)
    pages = allocator.allocate(4)
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4]
    assert NULL_PAGE not in pages
    assert allocator.allocate(1) is None
    assert allocator.num_free == 0
    allocator.check_integrity([pages])


def test_a_request_for_too_many_takes_none():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == allocator.num_usable == 3


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1) or []
    allocator.share([page])
    allocator.check_integrity([[page], [page]])
    allocator.release([page])
    assert allocator.num_free == 1
    allocator.release([page])
    assert allocator.num_free == 2
    allocator.check_integrity([])


def test_every_allocation_of_a_page_has_its_own_generation():
    allocator = PageAllocator(3)
    seen: set[int] = set()
    for _ in range(10):
        pages = allocator.allocate(2) or []
        generations = [int(allocator.generations[page]) for page in pages]
        assert all(generation > 0 for generation in generations)
        assert seen.isdisjoint(generations)
        seen.update(generations)
        allocator.release(pages)
    assert len(seen) == 20


def test_releasing_twice_is_our_own_fault_and_says_so():
    allocator = PageAllocator(3)
    pages = allocator.allocate(1) or []
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        allocator.share(pages)


def test_integrity_names_the_page_that_is_not_accounted_for():
    allocator = PageAllocator(4)
    (page,) = allocator.allocate(1) or []
    with pytest.raises(AssertionError, match=f"page {page}"):
        allocator.check_integrity([])


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="at least 2"):
        PageAllocator(1)
