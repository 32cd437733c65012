"""Every row that is returned was computed for that very position, and says how it came about."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.extension import RenamedWeights
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests.records import ModelCard, RoutedExperts
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.step_plan import StepResult
from tests.support.devices.counting_executor import ROUTING, CountingExecutor
from tests.support.engine.schedulers import ABORT, choices, one, scheduler

NUM_PAGES = 64
PAGE_SIZE = 4

CARD = ModelCard("", 64, 64, (), ROUTING, returns_routing=True, weight_version="v")


class Captured:
    """A step cycle with capture, and the routing of every sequence that has ended."""

    def __init__(self, *, overlaps: bool = True, num_data_ranks: int = 1, **limits: object) -> None:
        target = scheduler(
            **{"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "num_data_ranks": num_data_ranks, **limits}
        )
        self.capture = RoutingCapture(CARD, target.table, num_pages=NUM_PAGES, num_data_ranks=num_data_ranks)
        self.executor = CountingExecutor()
        self.cycle = cycle_with(target, self.executor, capture=self.capture, overlaps=overlaps)
        self.scheduler = target
        self.routing: dict[Sequence, RoutedExperts | None] = {}

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.routing |= {sequence: sequence.routing.final for sequence in self.cycle.run()[1]}

    def begin(self, sequence: Sequence, num_turns: int) -> None:
        """Add one more sequence, and turn."""
        self.scheduler.add([sequence])
        self.turn(num_turns)

    def lose(self, sequence: Sequence) -> None:
        """Preempt a sequence, whose pages go too."""
        self.scheduler.preempt(sequence)
        self.scheduler.flush()

    def finish(self, *groups: list[Sequence]) -> list[RoutedExperts]:
        """Run requests to their end; returns the routing of all their choices."""
        for group in groups:
            self.scheduler.add(group)
        while self.cycle.has_work:
            self.turn()
        return [self.of(sequence) for group in groups for sequence in group]

    def abort(self, sequence: Sequence) -> RoutedExperts:
        self.routing[sequence] = self.cycle.end(sequence, ABORT).routing.final
        return self.of(sequence)

    def of(self, sequence: Sequence) -> RoutedExperts:
        routing = self.routing[sequence]
        assert routing is not None
        return routing


def wanting(request_id: str, prompt: int | list[int], **kwargs: object) -> Sequence:
    return one(request_id, prompt, routing=True, **kwargs)


def positions(routing: RoutedExperts) -> list[int]:
    return routing.rows[:, 0, 0].tolist()


def steps(routing: RoutedExperts) -> list[int]:
    """Which step computed each row."""
    return routing.rows[:, 0, 1].tolist()


@pytest.mark.parametrize("first_row", [0, 1, 8, 9])
@pytest.mark.parametrize("num_new", [0, 1, 6])
def test_only_rows_from_the_wanted_position_on_are_gathered(first_row: int, num_new: int):
    whole, part = (wanting(name, 9, num_new=num_new, first_row=first) for name, first in (("a", 0), ("b", first_row)))
    expected, found = Captured().finish([whole])[0], Captured().finish([part])[0]
    assert found.start == first_row and found.missing == ()
    np.testing.assert_array_equal(found.rows, expected.rows[first_row:])


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_there_is_a_row_for_every_token_but_the_last(overlaps: bool, chunk_tokens: int):
    captured = Captured(overlaps=overlaps, chunk_tokens=chunk_tokens)
    long, short, none = wanting("long", 21, num_new=9), wanting("short", [70], num_new=2), wanting("none", 5, num_new=0)
    for routing, count in zip(captured.finish([long], [short], [none]), (29, 2, 5), strict=True):
        assert positions(routing) == list(range(count))
        assert routing.missing == () and routing.weight_version == ((0, count, "v"),)


def test_cached_rows_are_those_of_whoever_computed_them():
    captured = Captured()
    (first,) = captured.finish([wanting("first", 21, num_new=9)])
    (second,) = captured.finish([wanting("second", 21, num_new=1)])
    (turn,) = captured.finish([wanting("turn", [*range(10, 10 + 29), 500], num_new=1)])
    assert steps(second)[:20] == steps(first)[:20] and steps(turn)[:28] == steps(first)[:28]
    assert second.source == ((0, 20, "cached"), (20, 21, "computed"))
    assert turn.source == ((0, 28, "cached"), (28, 30, "computed")) and positions(turn) == list(range(30))


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_whoever_asks_finds_rows_of_requests_that_did_not(caches_prefixes: bool):
    captured = Captured(caches_prefixes=caches_prefixes)
    captured.begin(one("not asking", 21, num_new=1), 3)
    (routing,) = captured.finish([wanting("asking", 21, num_new=1)])
    assert positions(routing) == list(range(21)) and routing.missing == ()
    assert (routing.source[0][2] == "cached") == caches_prefixes


def computed_twice() -> tuple[Captured, Sequence]:
    """A sequence that is preempted after six steps, computed anew from its first token, and run to its end."""
    captured, sequence = Captured(), wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    captured.lose(sequence)
    captured.finish()
    return captured, sequence


def test_rows_of_sampled_tokens_stay_those_of_the_first_run():
    captured, sequence = computed_twice()
    routing = captured.of(sequence)
    assert positions(routing) == list(range(20)) and routing.missing == ()
    assert steps(routing)[9:13] == [1, 2, 3, 4], "what goes with the log-probs that the client was told"
    assert set(steps(routing)[:9]) == {6}
    assert routing.source == ((0, 9, "recomputed"), (9, 20, "computed"))


def test_others_find_the_rows_of_the_first_run_too():
    captured, sequence = computed_twice()
    (later,) = captured.finish([wanting("later", sequence.token_ids[:17].tolist(), num_new=1)])
    assert steps(later)[9:13] == [1, 2, 3, 4]


def test_a_preemption_that_loses_nothing_shows_nowhere():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    captured.scheduler.preempt(sequence)
    captured.finish()
    assert captured.of(sequence).source == ((0, 20, "computed"),)
    assert steps(captured.of(sequence))[:13] == [0] * 9 + [1, 2, 3, 4]


def test_choices_share_the_rows_of_their_prompt():
    captured = Captured()
    first, second = captured.finish(choices("a", 10, n=2, routing=True, num_new=3))
    assert first.source == ((0, 12, "computed"),)
    assert second.source == ((0, 10, "cached"), (10, 12, "computed"))
    assert steps(second)[:8] == steps(first)[:8] and positions(second) == list(range(12))


@pytest.mark.parametrize(("num_turns", "num_known"), [(1, 0), (2, 8), (3, 16), (4, 20), (6, 22)])
def test_an_abort_misses_what_is_still_on_its_way(num_turns: int, num_known: int):
    captured = Captured(chunk_tokens=8)
    sequence = wanting("a", 20, num_new=30)
    captured.begin(sequence, num_turns)
    routing = captured.abort(sequence)
    count = max(sequence.num_tokens - 1, min(8 * num_turns, 20))
    assert len(routing.rows) == count
    assert routing.missing == (((num_known, count),) if num_known < count else ())
    assert positions(routing)[:num_known] == list(range(num_known)) and not routing.rows[num_known:].any()
    captured.turn()
    assert not captured.cycle.has_work


def test_an_abort_while_it_waits_reports_what_was_kept():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    captured.scheduler.preempt(sequence)
    blocker = [one(f"b{i}", [300 + i], num_new=40) for i in range(4)]
    captured.scheduler.waiting.clear()
    for other in blocker:
        captured.scheduler.add([other])
    captured.turn()
    captured.scheduler.waiting.add(sequence)
    routing = captured.abort(sequence)
    assert positions(routing) == list(range(13)) and routing.missing == ()
    assert steps(routing) == [0] * 9 + [1, 2, 3, 4] and routing.source == ((0, 13, "computed"),)


@pytest.mark.parametrize("overlaps", [True, False])
def test_rows_that_were_on_their_way_at_a_preemption_are_kept_once_they_are_in(overlaps: bool):
    """Nine pages are too few for two prompts of twenty and what follows them: the younger one gives its pages back."""
    captured = Captured(overlaps=overlaps, num_pages=10, chunk_tokens=8, step_tokens=32)
    old, young = wanting("old", 12, num_new=20), wanting("young", [300 + i for i in range(20)], num_new=2)
    captured.begin(old, 4)
    captured.scheduler.add([young])
    while not captured.scheduler.num_preemptions:
        captured.turn()
    num_computed = young.queue.num_to_recompute
    assert young.row == NO_ROW and num_computed > 0
    assert captured.abort(young).missing == (((num_computed, 19),) if num_computed < 19 else ())


def test_rows_of_a_prompt_stand_in_until_it_is_computed_anew():
    captured = Captured(chunk_tokens=8)
    sequence = wanting("a", 20, num_new=12)
    captured.begin(sequence, 6)
    for _ in range(2):
        captured.lose(sequence)
        captured.turn(2)
    routing = captured.abort(sequence)
    assert positions(routing) == list(range(sequence.num_tokens - 1)) and routing.missing == ()
    assert steps(routing)[:20] == [8] * 8 + [7] * 8 + [2] * 4, "of each row the last one that came"
    assert routing.source == ((0, 16, "recomputed"), (16, len(routing.rows), "computed"))


def test_rows_of_data_ranks_do_not_mix():
    captured = Captured(num_data_ranks=2)
    group = [[wanting(f"r{i}", [100 * i + j for j in range(5 + i)], num_new=6)] for i in range(6)]
    for i, routing in enumerate(captured.finish(*group)):
        assert positions(routing) == list(range(10 + i)) and routing.missing == ()
    assert {sequence.data_rank for (sequence,) in group} == {0, 1}


def test_rows_that_never_come_are_missing():
    captured = Captured()
    sequence = wanting("a", 9, num_new=3)
    captured.scheduler.add([sequence])
    schedule = captured.scheduler.schedule()
    captured.capture.submitted(schedule)
    captured.capture.returned(schedule, StepResult(schedule.plan.step_id, *[np.zeros(0)] * 3), counts=None)
    assert captured.abort(sequence).missing == ((0, 9),)


def test_a_store_of_overwritten_pages_is_missing_and_not_wrong():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 3)
    sequence.page_generations[1] += 1000
    assert captured.abort(sequence).missing == ((4, 8),)


def test_every_row_names_the_weights_it_was_computed_under():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 4)
    captured.capture.reset(RenamedWeights("w"))
    assert captured.capture.weight_version == "w"
    captured.finish()
    routing = captured.of(sequence)
    assert routing.missing == () and routing.weight_version == ((0, 12, "v"), (12, 20, "w"))
    assert [step < 4 for step in steps(routing)] == [True] * 12 + [False] * 8
    (later,) = captured.finish([wanting("later", sequence.token_ids[:17].tolist(), num_new=2)])
    assert later.weight_version == ((0, 12, "v"), (12, 18, "w")), "cached rows keep theirs"


def test_kept_rows_keep_their_version():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    captured.lose(sequence)
    captured.turn(0)
    captured.capture.reset(RenamedWeights("w"))
    captured.finish()
    routing = captured.of(sequence)
    assert steps(routing)[9:13] == [1, 2, 3, 4]
    assert routing.weight_version == ((0, 9, "w"), (9, 13, "v"), (13, 20, "w"))


def changed(captured: Captured, *, retracts: bool) -> None:
    """Go on under weights `w`."""
    captured.executor.stage_weights("w", None)
    captured.cycle.drain()
    if retracts:
        captured.cycle.retract()
    captured.cycle.take_staged_weights("w")


@pytest.mark.parametrize("retracts", [True, False])
def test_pages_whose_rows_are_of_older_weights_than_their_keys_are_found_by_nobody(retracts: bool):
    captured, sequence = Captured(), wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    changed(captured, retracts=retracts)
    captured.turn(2)
    if not retracts:
        captured.scheduler.preempt(sequence)
    captured.finish()
    assert captured.of(sequence).weight_version[1] == (9, 14, "v"), "the rows of outputs go with their log-probs"
    (later,) = captured.finish([wanting("later", sequence.token_ids[:17].tolist(), num_new=1)])
    assert later.source[0] == (0, 8, "cached") and later.missing == ()
    assert later.weight_version == ((0, 17, "w"),)


@pytest.mark.parametrize("retracts", [True, False])
def test_what_was_preempted_between_steps_is_kept_once_however_many_end_then(retracts: bool):
    """Keeping copies all rows of a sequence: done again at every end, it takes the square of their number."""
    captured = Captured(chunk_tokens=4)
    group = [wanting(f"r{i}", [100 * i + j for j in range(12)], num_new=4) for i in range(3)]
    for sequence in group:
        captured.scheduler.add([sequence])
    captured.turn(2)
    changed(captured, retracts=retracts)
    kept = [sequence.routing.kept for sequence in group]
    assert all(rows is not None and rows.is_known.any() for rows in kept[:2])
    for sequence in group[2], group[0]:
        captured.abort(sequence)
    assert group[1].routing.kept is kept[1]


def corrupt(store: RoutingStore, generator: np.random.Generator, slots: np.ndarray) -> None:
    """Do to some slots what may not happen: lose a stamp, take another's, or swap whole slots with another."""
    for slot in slots:
        other = int(generator.integers(len(store._stamps)))
        kind = generator.integers(3)
        if kind == 0:
            store._stamps[slot] = 0
        elif kind == 1:
            store._stamps[slot] += generator.integers(1, 5)
        else:
            for array in (store._rows, store._stamps, store._versions):
                array[[slot, other]] = array[[other, slot]]


@pytest.mark.parametrize("seed", range(20))
def test_a_corrupted_store_is_missing_rows_and_never_wrong(seed: int):
    generator, captured = np.random.default_rng(seed), Captured()
    sequences = [wanting(f"r{i}", [100 * i + j for j in range(9 + i)], num_new=20) for i in range(4)]
    for sequence in sequences:
        captured.scheduler.add([sequence])
    captured.turn(8)
    store = captured.capture._store
    held = np.flatnonzero(store._stamps)
    corrupt(store, generator, generator.choice(held, 12, replace=False))
    num_missing = 0
    for sequence in sequences:
        routing = captured.abort(sequence)
        missing = {position for first, last in routing.missing for position in range(first, last)}
        num_missing += len(missing)
        for position, found in enumerate(positions(routing)):
            assert position in missing or found == position
        versions = {p for first, last, name in routing.weight_version for p in range(first, last) if name == "v"}
        assert versions == set(range(len(routing.rows))) - missing
    assert num_missing > 0


def test_pieces_start_where_they_are_asked_to():
    captured = Captured()
    sequence = wanting("a", 9, num_new=12)
    captured.begin(sequence, 6)
    for start in range(14):
        routing = captured.capture.gather(sequence, start=start)
        assert routing.start == start and positions(routing) == list(range(start, sequence.num_tokens - 1))
        assert routing.missing == ()
    captured.scheduler.preempt(sequence)
    for start in (0, 5, 9, 11, 13):
        routing = captured.capture.gather(sequence, start=start)
        assert positions(routing) == list(range(start, 13)) and routing.missing == ()
    captured.finish()


def test_who_does_not_ask_gets_none():
    captured = Captured()
    sequence = one("a", 9)
    captured.scheduler.add([sequence])
    captured.finish()
    assert captured.routing == {sequence: None}
