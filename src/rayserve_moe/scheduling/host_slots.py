"""Slots of host memory for pages of a data rank, and the records of the pages in them, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.scheduling.step_plan import NO_SLOT, HostSizes

PageName = bytes
"""Digest of the namespace of a prefix and of its tokens up to the end of the page."""


@dataclass(slots=True, eq=False)
class HostedPage:
    """A page in host memory."""

    slot: int
    entry_slot: int
    """Slot of its entries; NO_SLOT for none."""
    are_held: tuple[bool, ...]
    """For each state, True if its data is in host memory."""
    rows: Any
    """Routing rows (`PageRows`); None on a server that captures none."""
    is_transferred: bool = False
    """True if another replica has computed it."""

    def covers(self, are_held: tuple[bool, ...]) -> bool:
        """Return True if the page holds every state that is True in `are_held`."""
        return all(has or not wanted for has, wanted in zip(self.are_held, are_held, strict=True))


class PageSlots(NamedTuple):
    """Slots of a data rank that hosts read or write beside steps."""

    data_rank: int
    slots: np.ndarray
    """Slot and slot of entries of each page, int32 [N, 2]."""
    after_step: int
    """Id of the step whose copies come first."""


class SlotBytes(NamedTuple):
    """Bytes of pages on a device."""

    arrays: tuple[np.ndarray, ...]
    """Rows of each pool, [N, layers, ...]; of pools of entries, [pages with entries, layers, ...]."""
    checksums: np.ndarray
    """CRC-32 of each page, uint32 [N]."""


class HostSlots:
    """Slots of a data rank, and the records of pages by name.

    A slot is free, lent, or has one named page. A lent slot has no name yet: its bytes are on their way.
    """

    def __init__(self, sizes: HostSizes, *, first_entry: int) -> None:
        self.sizes, self._first_entry = sizes, first_entry
        self.pages: OrderedDict[PageName, HostedPage] = OrderedDict()
        self.busy: frozenset[PageName] = frozenset()
        """Names of pages on their way to the devices; they keep their slots."""
        self._with_entry: dict[PageName, None] = {}
        self._lent: dict[int, HostedPage] = {}
        self._free = list(range(sizes.num_pages))[::-1]
        self._free_entries = list(range(sizes.num_entries))[::-1]

    def lend(self, are_held: tuple[bool, ...], *, rows: Any) -> HostedPage | None:
        """Return a record with a free slot; evict the least recently used page if no slot is free.

        Return None if that page is busy. The record has no entry if no slot for entries is free.
        """
        if not self._free:
            oldest = next(iter(self.pages), None)
            if oldest is None or oldest in self.busy:
                return None
            self.forget(oldest)
        slot, entry_slot = self._free.pop(), NO_SLOT
        if any(are_held[self._first_entry :]) and (entry_slot := self._take_entry()) == NO_SLOT:
            are_held = self._without_entries(are_held)
        self._lent[slot] = hosted = HostedPage(slot, entry_slot, are_held, rows)
        return hosted

    def name(self, hosted: HostedPage, name: PageName) -> None:
        """Give a lent record its name, in place of the page that has it."""
        if name in self.pages:
            self.forget(name)
        del self._lent[hosted.slot]
        self.pages[name] = hosted
        if hosted.entry_slot != NO_SLOT:
            self._with_entry[name] = None

    def take_back(self, hosted: HostedPage) -> None:
        """Free the slots of a lent record."""
        del self._lent[hosted.slot]
        self._release(hosted)

    def forget(self, name: PageName) -> None:
        """Free the slots of a page."""
        self._with_entry.pop(name, None)
        self._release(self.pages.pop(name))

    def clear(self) -> None:
        """Forget all pages. Lent slots stay lent."""
        for name in list(self.pages):
            self.forget(name)

    def check_integrity(self) -> None:
        """Assert that every slot is free, lent, or has one page."""
        records = [*self.pages.values(), *self._lent.values()]
        slots = [hosted.slot for hosted in records]
        assert sorted([*slots, *self._free]) == list(range(self.sizes.num_pages)), "slots are lost or shared"
        named = {name for name, hosted in self.pages.items() if hosted.entry_slot != NO_SLOT}
        assert named == set(self._with_entry), "pages with entries are miscounted"
        entries = [hosted.entry_slot for hosted in records if hosted.entry_slot != NO_SLOT]
        assert sorted([*entries, *self._free_entries]) == list(range(self.sizes.num_entries)), "entries"

    def _release(self, hosted: HostedPage) -> None:
        self._free.append(hosted.slot)
        if hosted.entry_slot != NO_SLOT:
            self._free_entries.append(hosted.entry_slot)

    def _take_entry(self) -> int:
        """Return a free slot for entries, or take the slot of the page that has held one the longest."""
        if not self._free_entries:
            oldest = next(iter(self._with_entry), None)
            if oldest is None or oldest in self.busy:
                return NO_SLOT
            hosted = self.pages[oldest]
            self._free_entries.append(hosted.entry_slot)
            del self._with_entry[oldest]
            hosted.entry_slot = NO_SLOT
            hosted.are_held = self._without_entries(hosted.are_held)
        return self._free_entries.pop()

    def _without_entries(self, are_held: tuple[bool, ...]) -> tuple[bool, ...]:
        return (*are_held[: self._first_entry], *(False for _ in are_held[self._first_entry :]))
