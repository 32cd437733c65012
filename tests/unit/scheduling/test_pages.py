"""Pages are handed out once, shared by count, and never carry the same generation twice."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.scheduling.pages import NULL_PAGE, PageAllocator

NO_PAGES = np.zeros(0, np.int32)


def take(allocator: PageAllocator, count: int) -> np.ndarray:
    page_ids = allocator.allocate(count)
    assert page_ids is not None
    return page_ids


def test_all_but_the_null_page_can_be_held_and_no_more():
    allocator = PageAllocator(5)
    page_ids = take(allocator, 4)
    assert page_ids.dtype == np.int32
    assert sorted(page_ids) == [1, 2, 3, 4]
    assert NULL_PAGE not in page_ids
    assert allocator.allocate(1) is None
    assert allocator.num_free == 0
    allocator.check_integrity([page_ids])


def test_a_request_for_too_many_takes_none():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == allocator.num_usable == 3
    allocator.check_integrity([])


def test_nothing_can_be_asked_for_and_given_back():
    allocator = PageAllocator(2)
    page_ids = take(allocator, 0)
    assert page_ids.shape == (0,) and page_ids.dtype == np.int32
    allocator.share(NO_PAGES)
    allocator.release(page_ids)
    assert allocator.references(NO_PAGES).shape == (0,)
    assert allocator.num_free == 1
    with pytest.raises(AssertionError, match="cannot be taken"):
        allocator.allocate(-1)


def test_what_is_handed_out_does_not_change_with_the_pool():
    allocator = PageAllocator(5)
    first = take(allocator, 2)
    kept = first.copy()
    allocator.release(first)
    second = take(allocator, 4)
    allocator.release(second)
    np.testing.assert_array_equal(first, kept)


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = PageAllocator(3)
    page = take(allocator, 1)
    allocator.share(page)
    assert allocator.references(page).tolist() == [2]
    allocator.check_integrity([page, page])
    allocator.release(page)
    assert allocator.references(page).tolist() == [1]
    assert allocator.num_free == 1
    allocator.release(page)
    assert allocator.references(page).tolist() == [0]
    assert allocator.num_free == 2
    allocator.check_integrity([])


def test_only_the_unshared_among_released_pages_are_free():
    allocator = PageAllocator(5)
    page_ids = take(allocator, 4)
    allocator.share(page_ids[1:3])
    allocator.release(page_ids)
    assert allocator.num_free == 2
    allocator.check_integrity([page_ids[1:3].tolist()])
    assert set(take(allocator, 2)) == {page_ids[0], page_ids[3]}


def test_every_allocation_of_a_page_has_its_own_generation():
    allocator = PageAllocator(3)
    seen: set[int] = set()
    for _ in range(10):
        page_ids = take(allocator, 2)
        generations = allocator.generations[page_ids].tolist()
        assert len(set(generations)) == 2 and all(generation > 0 for generation in generations)
        assert seen.isdisjoint(generations)
        seen.update(generations)
        allocator.release(page_ids)
    assert len(seen) == 20
    assert allocator.generations.dtype == np.int64


def test_sharing_keeps_the_generation():
    allocator = PageAllocator(3)
    page = take(allocator, 1)
    generation = allocator.generations[page].copy()
    allocator.share(page)
    allocator.release(page)
    np.testing.assert_array_equal(allocator.generations[page], generation)


def test_releasing_twice_is_our_own_fault_and_says_so():
    allocator = PageAllocator(3)
    page = take(allocator, 1)
    allocator.release(page)
    with pytest.raises(AssertionError, match=f"page {page[0]} is released twice"):
        allocator.release(page)
    with pytest.raises(AssertionError, match=f"page {page[0]} is free"):
        allocator.share(page)


@pytest.mark.parametrize("change", ["share", "release"])
def test_a_page_that_is_there_twice_in_one_call_is_refused_and_nothing_changes(change):
    allocator = PageAllocator(4)
    page_ids = take(allocator, 2)
    with pytest.raises(AssertionError, match="twice in one call"):
        getattr(allocator, change)(page_ids[[0, 1, 0]])
    allocator.check_integrity([page_ids])


@pytest.mark.parametrize("change", ["share", "release"])
def test_the_null_page_is_nobodys(change):
    with pytest.raises(AssertionError, match=f"page {NULL_PAGE} is"):
        getattr(PageAllocator(3), change)(np.array([NULL_PAGE], np.int32))


@pytest.mark.parametrize(
    ("holders", "complaint"),
    [
        ([], "page 1: 1 != 0"),
        ([[1], [1]], "page 1: 1 != 2"),
        ([[1, NULL_PAGE]], f"page {NULL_PAGE}: 0 != 1"),
        ([[1], [2]], "page 2: 0 != 1"),
        ([[1, 4]], "does not exist"),
        ([[1, -1]], "does not exist"),
    ],
)
def test_integrity_names_the_page_that_is_not_accounted_for(holders, complaint):
    allocator = PageAllocator(4)
    assert take(allocator, 1).tolist() == [1]
    allocator.check_integrity([[1]])
    with pytest.raises(AssertionError, match=complaint):
        allocator.check_integrity(holders)


def test_integrity_finds_a_page_that_is_free_twice():
    allocator = PageAllocator(4)
    allocator._free[0] = allocator._free[1]
    with pytest.raises(AssertionError, match="free list"):
        allocator.check_integrity([])


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="at least 2"):
        PageAllocator(1)
