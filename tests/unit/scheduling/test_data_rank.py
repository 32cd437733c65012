"""What one data rank owns adds up: rows, pages, and prefixes that others may find."""

from __future__ import annotations

import pytest

from rayserve_moe.scheduling.data_rank import EVICTION_BATCH, DataRank
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.state.groups import EntryGroup, PageGroup
from tests.support.engine.schedulers import one

PAGE_SIZE = 4
NUM_PAGES = 1 + 40
ROWS = range(4, 8)


@pytest.fixture
def table() -> RowTable:
    return RowTable(num_rows=8, max_tokens=100, page_size=PAGE_SIZE)


@pytest.fixture
def rank(table: RowTable) -> DataRank:
    """The second of two, with rows 4 to 7."""
    return DataRank(1, ROWS, num_pages=NUM_PAGES, table=table)


def admitted(rank: DataRank, table: RowTable, sequence: Sequence, *, num_computed: int) -> Sequence:
    """Give a sequence a row and the pages for `num_computed` tokens, as if they were computed."""
    rank.admit(sequence, rank.lock_prefix(sequence))
    pages = rank.take_pages(-(-num_computed // PAGE_SIZE) - len(sequence.pages))
    assert pages is not None
    table.extend(sequence.row, pages, generations=rank.allocator.generations[pages])
    table.num_computed[sequence.row] = num_computed
    rank.check_integrity()
    return sequence


def leave(rank: DataRank, sequence: Sequence) -> None:
    rank.dismiss(sequence)
    rank.release_pages(sequence)
    rank.check_integrity()


def test_rows_are_its_own_and_come_back(rank: DataRank, table: RowTable):
    sequences = [admitted(rank, table, one(f"r{i}", 3), num_computed=3) for i in range(4)]
    assert sorted(s.row for s in sequences) == list(ROWS) and rank.free_rows == []
    assert rank.running == rank.prefilling == sequences
    leave(rank, sequences[1])
    assert len(rank.free_rows) == 1 and sequences[1] not in rank.running


def test_sequences_decode_once_their_prompt_is_computed_oldest_first(rank: DataRank, table: RowTable):
    sequences = [admitted(rank, table, one(f"r{i}", 3), num_computed=3) for i in range(3)]
    assert rank.decoding_rows.tolist() == []
    rank.start_decoding(sequences[2])
    rank.start_decoding(sequences[0])
    assert rank.decoding_rows.tolist() == [sequences[0].row, sequences[2].row]
    leave(rank, sequences[0])
    assert rank.decoding_rows.tolist() == [sequences[2].row]


def test_whole_pages_of_what_was_computed_are_found_and_shared(rank: DataRank, table: RowTable):
    first = admitted(rank, table, one("a", 11), num_computed=11)
    rank.cache_computed(first, 11)
    second = one("b", 20)
    assert rank.num_cached(second) == 8
    admitted(rank, table, second, num_computed=8)
    assert second.num_computed == 8 and second.pages.tolist() == first.pages[:2].tolist()
    assert second.page_generations[:2].tolist() == first.page_generations[:2].tolist()
    leave(rank, first)
    leave(rank, second)
    assert rank.allocator.num_usable - rank.allocator.num_free == rank.tree.num_cached_pages == 2
    assert rank.num_available == rank.allocator.num_usable


def test_the_last_known_token_is_left_to_compute(rank: DataRank, table: RowTable):
    rank.cache_computed(admitted(rank, table, one("a", 8), num_computed=8), 8)
    assert rank.num_cached(one("b", 8)) == 4
    assert rank.num_cached(one("c", 9)) == 8


def test_other_namespaces_find_nothing(rank: DataRank, table: RowTable):
    rank.cache_computed(admitted(rank, table, one("a", 9), num_computed=9), 9)
    assert rank.num_cached(one("b", 9, salt="other")) == 0


def test_pages_in_use_are_not_evicted_and_the_rest_is(rank: DataRank, table: RowTable):
    ended = admitted(rank, table, one("ended", [*range(200, 280)]), num_computed=80)
    rank.cache_computed(ended, 80)
    leave(rank, ended)
    running = admitted(rank, table, one("running", 40), num_computed=40)
    rank.cache_computed(running, 40)
    assert rank.num_available == 30 and rank.allocator.num_free == 10
    assert rank.take_pages(31) is None
    assert rank.tree.num_cached_pages == 30, "nothing is given up for what cannot be had"
    pages = rank.take_pages(11)
    assert pages is not None and rank.tree.num_cached_pages == 30 - EVICTION_BATCH
    assert rank.num_cached(one("again", 41)) == 40
    rank.allocator.release(pages)
    rank.check_integrity()


def test_after_a_flush_nothing_old_is_found_or_cached(rank: DataRank, table: RowTable):
    old = admitted(rank, table, one("a", 12), num_computed=8)
    rank.cache_computed(old, 8)
    rank.flush()
    rank.check_integrity()
    assert rank.num_cached(one("b", 12)) == 0
    table.num_computed[old.row] = 12
    rank.cache_computed(old, 12)
    assert rank.num_cached(one("b", 13)) == 0, "it may hold what the flush was to forget"
    assert len(old.pages) == 2, "what runs keeps its pages"
    leave(rank, old)
    assert rank.allocator.num_free == rank.allocator.num_usable
    young = admitted(rank, table, one("c", 12), num_computed=12)
    rank.cache_computed(young, 12)
    assert rank.num_cached(one("d", 13)) == 12


def test_a_page_that_is_lost_is_noticed(rank: DataRank, table: RowTable):
    sequence = admitted(rank, table, one("a", 11), num_computed=11)
    table.state.page_ids[sequence.row, 0] = 30
    with pytest.raises(AssertionError):
        rank.check_integrity()


def test_a_row_that_is_lost_is_noticed(rank: DataRank):
    rank.free_rows.pop()
    with pytest.raises(AssertionError, match="rows are lost or shared"):
        rank.check_integrity()


def test_no_pages_are_pages_too(rank: DataRank):
    pages = rank.take_pages(0)
    assert pages is not None and len(pages) == 0
    assert rank.take_pages(NUM_PAGES) is None


def test_a_prefix_is_found_as_far_as_all_states_can_use_it(table: RowTable):
    """Five pages are cached, an entry stands after the fourth, and queries see five positions."""
    groups = (PageGroup(5, NUM_PAGES),)
    entry_groups = (EntryGroup("delta", 2 * PAGE_SIZE, 8 + 2 * len(ROWS)),)
    rank = DataRank(1, ROWS, num_pages=NUM_PAGES, table=table, page_groups=groups, entry_groups=entry_groups)
    first = admitted(rank, table, one("a", 21), num_computed=21)
    windowed, entries = rank.states
    pages = first.pages.copy()
    rank.cache_computed(first, 20)
    leave(rank, first)
    found = []
    for state, lost in ((windowed, pages[:1]), (entries, pages[1:2]), (windowed, pages[2:3]), (entries, pages[3:4])):
        state.forget(lost)
        found.append(rank.num_cached(one("b", 23)))
    assert found == [16, 16, 16, 0]
