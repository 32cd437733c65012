"""The table of a journal: one owner per request, a bound on memory, and a time to live."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rayserve_moe.fleet.journal import ENTRY_BYTES, JournalTable
from rayserve_moe.fleet.journal_records import AskedRequest, committed_in, packed_update
from rayserve_moe.fleet.journal_wire import Fence
from rayserve_moe.requests.columns import PromptColumns, ragged
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.results import ChoiceResult, DraftCounts

FIRST, SECOND = object(), object()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table_of(max_bytes: int = 10_000, clock: Clock | None = None) -> JournalTable:
    return JournalTable(max_bytes=max_bytes, ttl_s=10.0, clock=clock or Clock())


def test_a_late_write_of_the_owner_before_is_refused():
    table, first = table_of(), Fence(1, 50)
    assert table.open(b"a", first, records=[b"asked"], owner=FIRST) and table.commit(b"a", first, records=[b"1"])
    taken = table.take_over(b"a", 40, owner=SECOND)  # by a replica that started earlier
    assert taken is not None and taken[1] is FIRST and taken[0].records == [b"asked", b"1"]
    second = taken[0].fence
    assert second > first
    assert table.commit(b"a", first, records=[b"late"]) is None
    table.close(b"a", first)
    assert table.commit(b"a", second, records=[b"2"]) and taken[0].records == [b"asked", b"1", b"2"]
    assert taken[0].closed_at is None
    table.check_integrity()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_successor_keeps_the_later_owner_whoever_comes_first(order):
    table = table_of()
    states = [(Fence(1, 90), [b"asked"], FIRST), (Fence(2, 40), [b"asked", b"1"], SECOND)]
    answers = {}
    for place in order:
        fence, records, owner = states[place]
        answers[place] = table.open(b"a", fence, records=records, owner=owner)
    assert answers[1] is True and answers[0] is (True if order == (0, 1) else None)
    entry = table.read(b"a")
    assert entry is not None and entry.owner is SECOND and table.commit(b"a", Fence(1, 90), records=[b"late"]) is None
    table.check_integrity()


def test_a_request_that_another_replica_runs_under_this_name_stays_its_own():
    table = table_of()
    assert table.open(b"a", Fence(1, 1), records=[b"asked"], owner=FIRST)
    assert table.open(b"a", Fence(1, 2), records=[b"other"], owner=SECOND) is False
    table.lose(FIRST)
    assert table.open(b"a", Fence(1, 2), records=[b"other"], owner=SECOND) is True
    table.check_integrity()


def test_entries_live_for_their_time_after_their_last_byte_or_their_replica():
    clock = Clock()
    table = table_of(clock=clock)
    for name in (b"closed", b"lost", b"runs"):
        table.open(name, Fence(1, 1), records=[b"asked"], owner=FIRST if name == b"lost" else SECOND)
    table.close(b"closed", Fence(1, 1))
    clock.now = 5.0
    table.lose(FIRST)
    for now, left in ((9.0, 3), (10.5, 2), (15.5, 1), (99.0, 1)):
        clock.now = now
        table.expire()
        assert len(table) == left
    assert table.read(b"runs") is not None and table.num_dropped == 0
    table.check_integrity()


def test_memory_is_bounded_and_what_runs_outlives_what_has_ended():
    draw, table = random.Random(3), table_of(max_bytes=8 * ENTRY_BYTES)
    for step in range(2000):
        name, fence = bytes([draw.randrange(12)]), Fence(1, 1)
        action = draw.randrange(5)
        if action == 0:
            table.open(name, fence, records=[b"x" * draw.randrange(1, 200)], owner=FIRST)
        elif action == 1:
            table.close(name, fence)
        elif action == 2:
            table.take_over(name, step, owner=SECOND)
        else:
            entry = table.read(name)
            table.commit(name, fence if entry is None else entry.fence, records=[b"y" * draw.randrange(300)])
        table.check_integrity()
    assert table.num_dropped
    large = table_of(max_bytes=2 * ENTRY_BYTES)
    assert large.open(b"old", Fence(1, 1), records=[b"asked"], owner=FIRST)
    large.close(b"old", Fence(1, 1))
    assert large.open(b"new", Fence(1, 1), records=[b"x" * ENTRY_BYTES], owner=FIRST) is True
    assert large.read(b"old") is None
    assert large.commit(b"new", Fence(1, 1), records=[b"x" * ENTRY_BYTES]) is False and len(large) == 0


def test_records_hold_all_that_an_update_has():
    top = {"top_ids": np.array([[1, 2]], np.int32), "top_logprobs": np.array([[-0.1, -2]], np.float32)}
    scores = top | {"logprobs": np.array([-1.5], np.float32), "ranks": np.array([4], np.int32)}
    routing = RoutedExperts(
        np.arange(24, dtype=np.uint8).reshape(2, 2, 6), 4, (), ((4, 6, "computed"),), ((4, 6, "7"),),
        parts={"index": np.array([b"row", None], object)},
    )  # fmt: skip
    update = ChoiceResult(
        choice_index=1,
        token_ids=[7],
        logprobs=[float(np.float32(-0.3))],
        finish=FinishReason("stop", matched="x"),
        routing=routing,
        num_cached_tokens=2,
        columns=top
        | {
            "entropy": np.array([0.5], np.float32),
            "mask_ids": ragged([np.array([4, 7], np.int32)]),
            "mask_logprobs": np.array([-0.2], np.float32),
        },
        prompt=PromptColumns(scores | {"listed_logprobs": np.array([[-3.0]], np.float32)}, {"logprobs": 3}, "7"),
        weight_versions=((5, "7"),),
        ranks=[3],
        drafts=DraftCounts(3, 2, 1),
    )
    none, found = committed_in([packed_update(1, update)], 2)
    assert none == ChoiceResult() and repr(found) == repr(update)
    asked = AskedRequest("/generate", b"{}", "", "stem", (b"1234",), (7,), (2,), "7", ("a@1",))
    assert AskedRequest.read(asked.packed()) == asked
