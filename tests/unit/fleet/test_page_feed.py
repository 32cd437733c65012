"""Over real connections: a router knows what a replica's prefix trees hold, and nothing is held up by who reads it."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rayserve_moe.cluster.channel import prove_connecting
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.engine.command_queue import CommandQueue
from rayserve_moe.engine.page_watch import PageWatch
from rayserve_moe.fleet import page_feed, serve_router
from rayserve_moe.fleet.choosing import Prompt
from rayserve_moe.fleet.page_feed import IS_PREFILL, METADATA, PageFeed
from rayserve_moe.fleet.page_log import ADDED, EVENTS, PageMessage
from rayserve_moe.fleet.serve_router import FleetView
from rayserve_moe.scheduling.page_digests import prompt_digests
from rayserve_moe.scheduling.rank_step import StepLimits
from rayserve_moe.scheduling.scheduler import Scheduler, change_weights

PAGE = 2
KEY = b"k" * 32
LIMITS = StepLimits(
    num_rows=2, step_tokens=32, chunk_tokens=32, page_size=PAGE, num_pages=64, max_tokens=64, num_data_ranks=1
)


class Replica:
    """A scheduler and its feed; what a test does to the tree happens in the test's thread, as the engine's."""

    def __init__(self, key: bytes = KEY) -> None:
        self.scheduler, commands = Scheduler(LIMITS), CommandQueue()
        self.watch = PageWatch(SimpleNamespace(scheduler=self.scheduler), commands)
        self.live: list[str] = []
        self.feed = PageFeed(self.watch, Capacity(self.live, 2), host="127.0.0.1", key=key)
        commands.run_all()

    def cache(self, num_tokens: int, start: int = 1) -> None:
        rank, ids = self.scheduler.ranks[0], tokens(num_tokens, start)
        pages = rank.allocator.allocate(num_tokens // PAGE)
        rank.tree.insert(("",), ids, page_ids=pages)
        rank.allocator.release(pages)


def tokens(num_tokens: int, start: int = 1) -> np.ndarray:
    return np.arange(start, start + num_tokens, dtype=np.int32)


def prompt_of(num_tokens: int, start: int = 1) -> Prompt:
    ids = tokens(num_tokens, start)
    return Prompt(num_tokens, prompt_digests(KEY, "", token_ids=ids, page_size=PAGE), PAGE)


async def become(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def replica():
    replica = Replica()
    yield replica
    replica.feed.stop()


def follow(check, *addresses, key=KEY):
    """Run a check on a view that follows replicas `0`, `1`, ... at these addresses."""

    async def run() -> None:
        view = FleetView(key, draw=random.Random(0))
        view.follow({str(place): address for place, address in enumerate(addresses)})
        try:
            await check(view)
        finally:
            view.close()
            await asyncio.sleep(0.02)  # connections end in turns of the loop

    asyncio.run(run())


def test_a_router_learns_what_is_cached_before_and_after_it_connects(replica):
    replica.cache(8)

    async def check(view: FleetView) -> None:
        await become(lambda: view.choosing.num_cached("0", prompt_of(9)) == 8)
        assert view.page_size == PAGE
        replica.cache(4, start=100)
        await become(lambda: view.choosing.num_cached("0", prompt_of(5, start=100)) == 4)
        change_weights(replica.scheduler, "1")
        await become(lambda: view.choosing.num_cached("0", prompt_of(9)) == 0)
        assert view.index.weight_version("0") == "1"

    follow(check, replica.feed.address)


def test_a_request_goes_to_the_replica_that_has_its_prefix(replica):
    other = Replica()
    other.cache(16)

    async def check(view: FleetView) -> None:
        replicas = {"0": replica.feed.address, "1": other.feed.address}
        await become(lambda: all(map(view.index.is_known, ["0", "1"])))
        assert view.choose(prompt_of(17), replicas) == "1"

    try:
        follow(check, replica.feed.address, other.feed.address)
    finally:
        other.feed.stop()


def test_replicas_that_compute_prompts_answer_if_no_other_is_there(replica):
    other = Replica()
    other.cache(16)
    prefills = {METADATA: {**other.feed.address[METADATA], IS_PREFILL: True}}

    async def check(view: FleetView) -> None:
        await become(lambda: all(map(view.index.is_known, ["0", "1"])))
        replicas = {"0": replica.feed.address, "1": prefills}
        assert {view.choose(prompt_of(17), replicas) for _ in range(9)} == {"0"}
        assert view.choose(prompt_of(17), {"1": prefills}) == "1"

    try:
        follow(check, replica.feed.address, prefills)
    finally:
        other.feed.stop()


def test_a_replica_that_is_gone_counts_as_empty_and_still_can_be_chosen(replica, monkeypatch):
    monkeypatch.setattr(serve_router, "RETRY_S", 0.05)
    replica.cache(8)

    async def check(view: FleetView) -> None:
        await become(lambda: view.choosing.num_cached("0", prompt_of(9)) == 8)
        replica.feed.stop()
        await become(lambda: not view.index.is_known("0"))
        assert view.choose(prompt_of(9), {"0": replica.feed.address}) == "0"

    follow(check, replica.feed.address)


def test_nothing_is_sent_to_who_does_not_know_the_key(replica):
    replica.cache(8)

    async def check(view: FleetView) -> None:
        await asyncio.sleep(0.3)
        assert not view.index.is_known("0") and len(view.index) == 0

    follow(check, replica.feed.address, key=b"x" * 32)


def test_a_replica_without_a_feed_is_chosen_by_load():
    async def check(view: FleetView) -> None:
        assert view.choose(prompt_of(9), {"0": {}, "1": {METADATA: {"host": "127.0.0.1"}}}) in ("0", "1")
        await asyncio.sleep(0.05)

    follow(check, {}, {METADATA: {"host": "127.0.0.1"}})


def test_a_reader_that_stops_reading_is_cut_off_and_holds_up_nobody(replica, monkeypatch):
    monkeypatch.setattr(page_feed, "MAX_UNSENT", 4)
    address = replica.feed.address[METADATA]

    async def check(view: FleetView) -> None:
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        await prove_connecting(reader, writer, key=KEY)
        await become(lambda: len(replica.feed._unsent) == 1)
        large = PageMessage("epoch", 0, EVENTS, ((ADDED, 0, bytes(1 << 20)),))
        for _ in range(40):
            replica.feed._loop.call_soon_threadsafe(replica.feed._send, large)
        await become(lambda: not replica.feed._unsent)
        view.follow({"0": replica.feed.address})
        await become(lambda: view.index.is_known("0"))
        replica.cache(2)
        await become(lambda: view.choosing.num_cached("0", prompt_of(3)) == 2)
        writer.close()

    follow(check)


def test_load_is_reported(replica):
    async def check(view: FleetView) -> None:
        await become(lambda: view.index.is_known("0"))
        for _ in range(3):
            request = SimpleNamespace(priority=0)
            replica.scheduler.waiting.add(SimpleNamespace(num_tokens=50, num_computed=0, request=request))
        await become(lambda: "0" in view.choosing._loads and view.choosing._loads["0"].queued_tokens == 150)
        assert view.choosing._loads["0"].num_choices == 3

    follow(check, replica.feed.address)


def test_a_replica_that_has_as_many_requests_as_it_takes_is_known_to_be_full():
    full, other = Replica(), Replica()
    addresses = {"full": full.feed.address, "other": other.feed.address}

    async def check(view: FleetView) -> None:
        view.follow(addresses)
        await become(lambda: view.index.is_known("full") and view.index.is_known("other"))
        full.cache(8)
        await become(lambda: view.choosing.num_cached("full", prompt_of(9)) == 8)
        assert view.choose(prompt_of(9), addresses) == "full"
        full.live += ["one", "two"]
        await become(lambda: view.choose(prompt_of(9), addresses) == "other")

    try:
        follow(check)
    finally:
        full.feed.stop()
        other.feed.stop()
