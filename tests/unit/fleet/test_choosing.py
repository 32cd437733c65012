"""A request goes where most of it is cached, unless what runs there already costs it more."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rayserve_moe.fleet import choosing
from rayserve_moe.fleet.choosing import REPORTED_WITHIN_S, UNPARSED, Choosing, Prompt
from rayserve_moe.fleet.load_average import AVERAGED_S, Load, LoadAverage, Report
from rayserve_moe.fleet.page_log import ADDED, WEIGHTS, PageMessage
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.scheduling.page_digests import prompt_digests

PAGE = 16
REPLICAS = ("a", "b", "c", "d")
STARTS = (("a", 1), ("b", 100_000))


class Fleet:
    """A router over replicas whose pages and load a test states; time passes when it says so."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.index = PrefixIndex()
        self.index.follow(REPLICAS)
        self.choosing = Choosing(self.index, draw=random.Random(seed), clock=lambda: self.now)

    def hold(self, name: str, prompt: Prompt, num_pages: int) -> None:
        events = ((WEIGHTS, 0, b"0"), (ADDED, 0, b"".join(prompt.digests[:num_pages])))
        for left, event in zip((1, 0), events, strict=True):
            self.index.apply(name, PageMessage("epoch", 0, left, (event,)))

    def choose(self, prompt: Prompt) -> str:
        return self.choosing.choose(prompt, REPLICAS)


def prompt_of(num_tokens: int, start: int = 1) -> Prompt:
    ids = np.arange(start, start + num_tokens, dtype=np.int32)
    return Prompt(num_tokens, prompt_digests(b"key", "", token_ids=ids, page_size=PAGE), PAGE)


def test_a_prompt_goes_where_most_of_it_is_cached():
    for seed in range(20):
        fleet, prompt = Fleet(seed), prompt_of(1000)
        fleet.hold("b", prompt, 20)
        fleet.hold("c", prompt, 50)
        assert fleet.choose(prompt) == "c"


def test_load_outweighs_a_short_prefix_and_not_a_long_one():
    fleet, prompt = Fleet(), prompt_of(8000)
    fleet.hold("b", prompt, 490)
    for name in REPLICAS:
        fleet.choosing.report(name, Report(Load(10 if name == "b" else 0)))
    assert fleet.choose(prompt) == "b"
    short = prompt_of(100, start=50_000)
    fleet.hold("b", short, 2)
    assert fleet.choose(short) != "b"


def test_queued_tokens_are_load():
    fleet = Fleet()
    for name in REPLICAS:
        fleet.choosing.report(name, Report(Load(4, queued_tokens=100_000 if name != "d" else 0)))
    assert fleet.choose(prompt_of(500)) == "d"


def test_sixteen_equal_prompts_go_to_one_replica():
    for seed in range(20):
        fleet, prompt = Fleet(seed), prompt_of(2000)
        assert len({fleet.choose(prompt) for _ in range(16)}) == 1


def test_equal_prompts_spread_once_the_one_replica_has_too_much():
    fleet, prompt = Fleet(), prompt_of(2000)
    chosen = Counter(fleet.choose(prompt) for _ in range(400))
    assert set(chosen) == set(REPLICAS) and max(chosen.values()) < 200


def test_different_prompts_spread_at_once():
    fleet = Fleet()
    chosen = Counter(fleet.choose(prompt_of(500, start=1000 * turn)) for turn in range(16))
    assert set(chosen.values()) == {4}


def test_a_request_for_several_choices_weighs_as_much_as_they_do():
    fleet = Fleet()
    many = fleet.choose(prompt_of(500)._replace(num_choices=16))
    chosen = Counter(fleet.choose(prompt_of(500, start=1000 * turn)) for turn in range(1, 13))
    assert many not in chosen and set(chosen.values()) == {4}


def test_what_has_run_for_a_second_is_reported_nearly_whole():
    assert min(LoadAverage(0.0).add(Load(100, 100), 1.0)) > 95


def full_fleet(taken: Sequence[int], most: int = 5) -> tuple[Fleet, Prompt]:
    """Replicas that take so many requests, and have these; `b` has cached the prompt."""
    fleet, prompt = Fleet(), prompt_of(8000)
    fleet.hold("b", prompt, 500)
    for name, number in zip(REPLICAS, taken, strict=True):
        fleet.choosing.places.limit(name, most)
        fleet.choosing.report(name, Report(Load(number), number))
    return fleet, prompt


def test_a_full_replica_is_sent_nothing_while_another_has_a_place():
    fleet, prompt = full_fleet((5, 5, 5, 4))
    assert fleet.choose(prompt) == "d"  # its last place, which is taken now
    assert fleet.choose(prompt) == "b"  # all are full
    fleet.choosing.report("b", Report(Load(4), 4))
    assert fleet.choose(prompt) == "b"


def test_where_all_are_full_it_goes_where_most_places_are():
    fleet, prompt = full_fleet((5, 5, 5, 5))
    assert fleet.choose(prompt) == "b"
    assert fleet.choose(prompt) != "b"


def test_places_are_counted_in_requests_whatever_their_choices():
    fleet, prompt = full_fleet((0, 0, 0, 0))
    many = prompt._replace(num_choices=16)
    assert Counter(fleet.choose(many) for _ in range(5)) == {"b": 5}
    assert fleet.choose(many) != "b"


def test_several_prompts_need_as_many_places():
    fleet, prompt = full_fleet((0, 3, 0, 1))
    assert fleet.choose(prompt._replace(num_requests=5)) in ("a", "c")
    fleet.choosing.report("d", Report(Load(2), 2))
    assert fleet.choose(prompt._replace(num_requests=2)) == "b"
    assert fleet.choose(prompt) != "b"


def test_short_requests_and_such_as_take_no_place_leave_a_replica_as_free_as_it_says():
    fleet, prompt = full_fleet((0, 0, 0, 0))
    for turn in range(100):
        fleet.now = turn / 20  # at most four are not reported
        assert fleet.choose(prompt) == "b"


def test_a_request_that_takes_no_place_counts_as_one_until_reports_would_include_it():
    """Such a request may move another request to a different replica, but none is rejected."""
    fleet, prompt = full_fleet((4, 5, 5, 5))
    assert fleet.choose(prompt) == "a" and fleet.choosing.places.num_free("a", now=fleet.now) == 0
    assert fleet.choose(prompt) in REPLICAS
    fleet.now += REPORTED_WITHIN_S
    assert fleet.choosing.places.num_free("a", now=fleet.now) == 1
    assert fleet.choose(prompt) == "a"


def test_a_replica_whose_feed_is_lost_is_not_taken_for_full():
    fleet, prompt = full_fleet((5, 5, 5, 4))
    fleet.choosing.places.lose("b")
    assert fleet.choosing.places.num_free("b", now=fleet.now) == math.inf
    assert fleet.choose(prompt) == "b"


def test_a_replica_without_a_limit_is_never_full():
    fleet, prompt = full_fleet((9, 9, 9, 9))
    fleet.choosing.forget("b")
    fleet.choosing.places.limit("b", None)
    fleet.choosing.report("b", Report(Load(9), 10_000))
    assert {fleet.choose(prompt) for _ in range(20)} == {"b"}


def test_equal_replicas_are_drawn():
    chosen = Counter(Fleet(seed).choose(prompt_of(300)) for seed in range(200))
    assert min(chosen[name] for name in REPLICAS) > 25


@pytest.mark.parametrize("prompt", [UNPARSED, prompt_of(3), Prompt(5000)])
def test_what_is_not_understood_goes_by_load_alone(prompt):
    fleet = Fleet()
    fleet.hold("a", prompt_of(1000), 62)
    for name, load in zip(REPLICAS, (3, 2, 0, 1), strict=True):
        fleet.choosing.report(name, Report(Load(load)))
    assert fleet.choose(prompt) == "c"


def test_a_replica_whose_events_are_not_whole_counts_as_empty():
    fleet, prompt = Fleet(), prompt_of(1000)
    fleet.hold("a", prompt, 62)
    fleet.index.lose("a")
    fleet.hold("b", prompt, 10)
    assert fleet.choose(prompt) == "b"


def test_booked_pages_expire():
    fleet, prompt = Fleet(), prompt_of(2000)
    first = fleet.choose(prompt)
    assert fleet.choosing.num_cached(first, prompt) == 124 * PAGE
    fleet.now += choosing.PAGES_BOOKED_S
    assert fleet.choosing.num_cached(first, prompt) == 0 and len(fleet.choosing.bookings) == 0


@pytest.mark.parametrize("seconds", [0.05, 0.3, 2.0, 10.0])
def test_a_request_that_runs_counts_once_booked_or_reported(seconds):
    fleet, average = Fleet(), LoadAverage(0.0)
    first = fleet.choose(prompt_of(3000))
    fleet.now += seconds
    reported = average.add(Load(1, 3000), fleet.now)
    booked = fleet.choosing.bookings.load(first, now=fleet.now)
    assert reported.num_choices + booked.num_choices == pytest.approx(1)
    assert reported.queued_tokens + booked.queued_tokens == pytest.approx(3000)


def test_booked_load_ends_where_a_replica_reports_nothing():
    fleet = Fleet()
    first = fleet.choose(prompt_of(3000))
    assert fleet.choosing.bookings.load(first, now=fleet.now) == (1, 3000)
    fleet.now += 20 * AVERAGED_S
    assert max(fleet.choosing.bookings.load(first, now=fleet.now)) < 1e-3


def test_short_requests_that_end_together_do_not_move_each_other():
    """A report sees eight requests of one replica and none of the other, and the next one the opposite."""
    fleet, averages = Fleet(), {name: LoadAverage(0.0) for name in "ab"}
    prompts = {name: [prompt_of(400, start=start + 1000 * place) for place in range(8)] for name, start in STARTS}
    for name, own in prompts.items():
        fleet.hold(name, Prompt(digests=[each for prompt in own for each in prompt.digests[:20]]), 160)
    for turn in range(60):
        fleet.now = turn * 0.1
        for name, load in zip("ab" if turn % 2 else "ba", (8, 0), strict=True):
            fleet.choosing.report(name, Report(averages[name].add(Load(load), fleet.now)))
        chosen = [(name, fleet.choosing.choose(prompt, "ab")) for name, own in prompts.items() for prompt in own]
        assert all(home == replica for home, replica in chosen), turn


def test_bookings_are_bounded(monkeypatch):
    monkeypatch.setattr(choosing, "MAX_BOOKED_PAGES", 300)
    fleet = Fleet()
    for turn in range(50):
        fleet.choose(prompt_of(1000, start=turn * 1000))
        assert len(fleet.choosing.bookings) <= 300


def test_a_replica_that_is_gone_leaves_nothing():
    fleet, prompt = Fleet(), prompt_of(2000)
    first = fleet.choose(prompt)
    fleet.choosing.forget(first)
    assert fleet.choosing.num_cached(first, prompt) == 0
    assert fleet.choosing.bookings.load(first, now=fleet.now) == Load()
    fleet.now += choosing.PAGES_BOOKED_S
    fleet.choose(prompt_of(10))
    assert len(fleet.choosing.bookings) == 0
