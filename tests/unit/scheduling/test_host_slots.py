"""Every slot of host memory is free, lent, or has one page."""

from __future__ import annotations

from rayserve_moe.scheduling.host_slots import HostedPage, HostSlots
from rayserve_moe.scheduling.step_plan import NO_SLOT, HostSizes


def slots_of(num_pages: int, num_entries: int = 0) -> HostSlots:
    """Return slots for pages with a state of pages and a state of entries."""
    return HostSlots(HostSizes(num_pages, num_entries), first_entry=1)


def lent(slots: HostSlots, *, has_entry: bool = False) -> HostedPage:
    hosted = slots.lend((True, has_entry), rows=None)
    assert hosted is not None
    slots.check_integrity()
    return hosted


def test_the_least_recently_used_page_leaves_its_slot():
    slots = slots_of(2)
    for name in (b"a", b"b", b"c"):
        slots.name(lent(slots), name)
    assert list(slots.pages) == [b"b", b"c"]
    slots.check_integrity()


def test_pages_on_their_way_keep_their_slots():
    slots = slots_of(1)
    slots.name(lent(slots), b"a")
    slots.busy = frozenset({b"a"})
    assert slots.lend((True, False), rows=None) is None


def test_lent_slots_outlive_all_pages():
    """Their bytes are on their way: nobody else may get them before they are taken back."""
    slots = slots_of(3)
    first, second = lent(slots), lent(slots)
    slots.name(lent(slots), b"a")
    slots.clear()
    assert not slots.pages and slots.lend((True, False), rows=None) is not None
    assert slots.lend((True, False), rows=None) is None
    slots.take_back(first)
    slots.name(second, b"b")
    slots.check_integrity()
    assert lent(slots).slot == first.slot


def test_a_named_page_replaces_the_page_of_that_name():
    slots = slots_of(2)
    slots.name(lent(slots), b"a")
    again = lent(slots)
    slots.name(again, b"a")
    slots.check_integrity()
    assert slots.pages == {b"a": again}


def test_without_a_slot_for_entries_a_page_holds_none():
    slots = slots_of(3, 1)
    first = lent(slots, has_entry=True)
    second = lent(slots, has_entry=True)
    assert first.entry_slot == 0 and (second.entry_slot, second.are_held) == (NO_SLOT, (True, False))
    slots.name(first, b"a")
    third = lent(slots, has_entry=True)
    assert third.entry_slot == 0 and (first.entry_slot, first.are_held) == (NO_SLOT, (True, False))
    for hosted in (second, third):
        slots.take_back(hosted)
    slots.forget(b"a")
    slots.check_integrity()
