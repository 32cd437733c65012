"""Shares stay open where they are wanted and nowhere else: in keepers, and in workers until other weights serve."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle

from rayserve_moe.checkpoints.open_shares import SharePlace, WeightShare, written_share
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.cluster.weight_keepers import WeightKeeper, WeightKeepers
from rayserve_moe.cluster.weight_sources import GroupTensors, WeightSources
from rayserve_moe.cluster.worker_tensors import BEGIN, FINISH, KEEP, SHARE, WorkerTensors
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.execution.weights.staged import WeightReading
from rayserve_moe.execution.weights.tensor_staging import TensorStaging


class Staging:
    """Shares a file of memory that says what it is of."""

    def begin(self, _: object) -> None: ...

    def drop(self) -> None: ...

    def finish(self, given_up: threading.Event) -> None: ...

    def share(self, token: str) -> WeightShare:
        return share_of(token)


class Reading:
    """Runs at once."""

    def give_up(self) -> None: ...

    def run(self, call: Callable[[threading.Event], None]) -> None:
        call(threading.Event())


def share_of(token: str) -> WeightShare:
    fd = os.memfd_create(token)
    os.write(fd, token.encode())
    return WeightShare(token, fd)


def num_open() -> int:
    """Files of memory that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith("/memfd:") for link in links)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = num_open()
    yield
    assert num_open() == before


def worker_of(share: WeightShare | None = None) -> WorkerTensors:
    return WorkerTensors(cast(TensorStaging, Staging()), cast(WeightReading, Reading()), share=share)


def said_at(place: Any) -> bytes:
    return os.pread(place.fd, 9, 0)


def test_a_keeper_has_open_what_it_keeps_after_its_writer_has_closed_it() -> None:
    keeper, first, second = WeightKeeper(), share_of("first"), share_of("second")
    places = [keeper.keep(0, each.place) for each in (first, second)]
    first.close()
    second.close()
    assert [said_at(place) for place in places] == [b"first", b"second"]
    keeper.keep_only("second")
    assert num_open() and said_at(places[1]) == b"second"
    assert said_at(keeper.keep(0, places[1])) == b"second", "in place of the one before"
    keeper.keep_only("")


def test_a_share_is_sealed_once_it_is_written_and_gone_where_that_fails() -> None:
    with written_share("a") as share:
        share.write(np.arange(5, dtype=np.uint8), 3)
    assert share.num_bytes == 8 and share.read(2, 5).tolist() == [0, 0, 1]
    with pytest.raises(OSError, match="not permitted"):
        share.write(np.zeros(1, np.uint8), 0)
    share.close()
    with pytest.raises(ValueError, match="half way"), written_share("a"):
        raise ValueError("half way")


def test_a_worker_has_open_what_serves_and_what_waits() -> None:
    worker = worker_of(share_of("a"))
    worker.answer(FINISH, "b")
    assert [said_at(worker.answer(SHARE, token)) for token in ("a", "b")] == [b"a", b"b"]
    worker.swap()
    assert worker.answer(SHARE, "a") is None and said_at(worker.answer(SHARE, "b")) == b"b"
    for end in (lambda: worker.answer(BEGIN, None), worker.drop):
        worker.answer(FINISH, "c")
        end()
        assert worker.answer(SHARE, "c") is None
    assert said_at(worker.answer(SHARE, "b")) == b"b", "an update that is dropped changes nothing"
    worker.answer(FINISH, "")  # nothing is to be kept
    worker.swap()
    assert worker.answer(SHARE, "b") is None


def test_what_is_shared_after_the_swap_takes_the_place_of_what_was_shared_before() -> None:
    """Nothing is written beside it."""
    worker, before = worker_of(share_of("a")), num_open()
    worker.answer(FINISH, "")
    worker.swap()
    assert num_open() == before - 1
    for token in ("b", "c"):
        worker.answer(KEEP, token)
        assert num_open() == before and said_at(worker.answer(SHARE, token)) == token.encode()
    assert worker.answer(SHARE, "b") is None
    worker.swap()


@pytest.mark.parametrize(
    ("keeps", "serving", "is_asked"),
    [
        ("after_swap", GroupWeights(None), True),
        ("auto", GroupWeights(None), True),
        ("auto", GroupWeights(None, kept=(SharePlace("a", 1, 2),)), False),
        ("auto", GroupWeights("/on a disk"), False),
        ("before_swap", GroupWeights(None), False),
        ("off", GroupWeights(None), False),
    ],
)
def test_weights_that_serve_come_to_be_kept_where_they_were_sent_and_are_not_yet(
    keeps: str, serving: GroupWeights, is_asked: bool
) -> None:
    settings, asked = ClusterSettings(keep_sent_weights=keeps), []
    sources = WeightSources(list, settings, timeout_s=lambda: 1.0, on_change=lambda: None)
    sources.tensors = cast(GroupTensors, SimpleNamespace(share_serving=lambda token: asked.append(token) or []))
    sources.serving = serving
    sources.keep()
    assert bool(asked) == is_asked and sources.serving == serving, "no host has one"


def test_nothing_is_kept_where_one_host_has_no_share() -> None:
    keepers = WeightKeepers(lambda: None)
    assert keepers.keep([], []) == keepers.keep(["n", "m"], [SharePlace("a", 1, 2), None]) == ()
    assert keepers.actors == {}


class Keeper:
    """Opens what it is given, as an actor."""

    def __getattr__(self, _: str) -> Keeper:
        return self

    def remote(self, *given: object) -> SharePlace:
        return cast(SharePlace, given[-1])


def test_weights_that_serve_stay_on_offer_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be dropped; of the same share opened again the last place counts."""
    monkeypatch.setattr(ray, "get", lambda places, timeout: places)
    keepers = WeightKeepers(lambda: None)
    keepers.actors = {"n": cast(ActorHandle, Keeper())}
    for place in (SharePlace("a", 1, 2), SharePlace("b", 1, 3), SharePlace("a", 1, 4)):
        assert keepers.keep(["n"], [place]) == (place,)
    assert [each.place.fd for token in "ab" for each in keepers.shares(token)] == [4, 3]
    keepers.keep_only("b")
    assert keepers.shares("a") == () and len(keepers.shares("b")) == 1


def test_weights_that_waited_are_closed_once_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client or a lost host drops them. Before that, a copy of them takes memory beside the serving weights."""
    monkeypatch.setattr(ray, "get", lambda places, timeout=0.0: places)
    sources = WeightSources(list, ClusterSettings(), timeout_s=lambda: 1.0, on_change=lambda: None)
    sources.keepers.actors = {"n": cast(ActorHandle, Keeper())}
    serving, waiting = SharePlace("serving", 1, 2), SharePlace("waiting", 1, 3)
    sources.serving = GroupWeights(None, kept=sources.keepers.keep(["n"], [serving]))
    sources.waiting = GroupWeights(None, kept=sources.keepers.keep(["n"], [waiting]))
    sources.tensors.drop()
    assert sources.waiting.token == "" and sources.keepers.shares("waiting") == ()
    assert [each.place for each in sources.keepers.shares("serving")] == [serving]


def test_weights_are_there_on_disk_or_where_they_are_kept() -> None:
    kept = GroupWeights(None, kept=(SharePlace("a", 1, 2),))
    assert [each.is_there for each in (GroupWeights(), GroupWeights("/x"), GroupWeights(None), kept)] == [
        *(True, True, False, True)
    ]
    elsewhere = (SharePlace("a", 3, 4),)
    assert kept.kept_at(elsewhere, "a").kept == elsewhere
    assert kept.kept_at(elsewhere, "b") is kept
