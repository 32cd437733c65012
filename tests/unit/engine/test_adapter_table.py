"""Adapters come and go by use: in host memory, and among those that are resident on the devices."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.checkpoints.bucket import SentAdapter
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.engine.adapters import (
    AdapterTable,
    LoadedAdapter,
    UnknownAdapterError,
    adapter_key,
    check_name,
    with_key,
)
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.engine.extension import ReplacedHosts
from rayserve_moe.requests.records import GenerationRequest, SamplingParams, WeightsRefusedError
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.waiting_queue import PASSES_PER_WAITING
from tests.support.engine.schedulers import Turns, one, scheduler

BODY = np.arange(4, dtype=np.uint8)


def loaded(name: str) -> LoadedAdapter:
    return LoadedAdapter(name, f"/adapters/{name}", BODY)


class Tables:
    """Scheduler with an adapter table; steps are planned sequentially."""

    def __init__(self, *, num_slots: int = 2, num_held: int = 3, per_step: int = 0) -> None:
        settings = AdapterSettings(num_slots, 8, per_step, num_held)
        self.in_use: set[str] = set()
        self.scheduler: Scheduler = scheduler(max_adapters=num_slots, step_adapters=settings.num_per_step)
        self.table = AdapterTable(settings, self.scheduler.table, keys_in_use=lambda: self.in_use)
        self.turns = Turns(self.scheduler, overlaps=False)

    def load(self, *keys: str) -> list[str]:
        return [gone for key in keys for gone in self.table.record(key, loaded(key.partition("@")[0]))]

    def run(self, *keys: str) -> tuple[list[int], tuple[tuple[int, str], ...]]:
        """Plan a step of a new sequence for each key; return the slots of chunks, and the loads."""
        for number, key in enumerate(keys):
            self.scheduler.add([of(key, f"{number} of {keys}")])
        schedule = self.scheduler.schedule()
        work = self.table.plan(schedule, None).plan.adapters
        self.turns.commit(schedule, 9)
        self.turns.finish()
        return ([], ()) if work is None else (work.slots.tolist(), work.loads)


def of(key: str, request_id: str):
    """Return a sequence of a request for an adapter."""
    sequence = one(request_id, 5, num_new=2)
    object.__setattr__(sequence.request, "adapter", key)
    return sequence


def test_a_step_loads_what_is_not_resident_and_evicts_the_least_recently_used():
    tables = Tables()
    tables.load("a@1", "b@1", "c@1")
    assert tables.run("a@1", "b@1") == ([0, 1], ((0, "a@1"), (1, "b@1")))
    assert tables.run("a@1") == ([0], ())
    assert tables.run("c@1", "") == ([1, -1], ((1, "c@1"),)), "b was used before a"
    assert tables.run("b@1") == ([0], ((0, "b@1"),))
    assert tables.table.statistics()["adapter_loads"] == 4


def test_a_step_without_adapters_has_no_work_for_them():
    tables = Tables()
    assert tables.run("") == ([], ())
    tables.load("a@1")
    assert tables.run("", "") == ([], ())


def test_new_hosts_have_no_resident_adapters():
    tables = Tables()
    tables.load("a@1")
    tables.run("a@1")
    tables.table.reset(ReplacedHosts(GroupLayout()))
    assert tables.run("a@1") == ([0], ((0, "a@1"),))


def test_host_memory_drops_the_least_recently_used_without_requests():
    tables = Tables()
    assert tables.load("a@1", "b@1", "c@1") == []
    tables.run("a@1")
    assert tables.load("d@1") == ["b@1"]
    assert set(tables.table.current) == {"a", "c", "d"}
    tables.in_use = {"c@1", "a@1", "d@1"}
    with pytest.raises(WeightsRefusedError, match="max_cpu_loras"):
        tables.load("e@1")
    assert set(tables.table.current) == {"a", "c", "d"}, "a refused load changes nothing"


def test_other_bytes_of_a_name_serve_later_requests_and_running_ones_keep_theirs():
    tables = Tables()
    tables.load("a@1")
    tables.in_use = {"a@1"}
    assert tables.load("a@2") == []
    assert tables.table.key_of("a") == "a@2" and tables.table.key_of("a@1") == "a@1"
    tables.in_use = set()
    assert tables.load("b@1") == ["a@1"]
    with pytest.raises(UnknownAdapterError):
        tables.table.key_of("a@1")
    assert tables.table.unload("a") == ["a@2"]
    with pytest.raises(UnknownAdapterError):
        tables.table.key_of("a")


def test_a_key_names_the_bytes():
    same, other = SentAdapter(BODY), SentAdapter(BODY + 1)
    assert adapter_key("a", same) == adapter_key("a", SentAdapter(BODY.copy())) != adapter_key("a", other)
    assert adapter_key("a", same).startswith("a@")
    with pytest.raises(WeightsRefusedError, match="may not end in @"):
        check_name(adapter_key("a", same))
    for name in ("a\nb", " a", "a ", " ", "a\x00"):
        with pytest.raises(WeightsRefusedError, match="must be printable"):
            check_name(name)
    for name in ("a", "a b", "tinker://run/sampler_weights/ü", "a@1", "a@main", f"{adapter_key('a', same)}-2"):
        check_name(name)


def test_requests_take_the_key_of_their_adapter_and_none_of_the_merged_one():
    tables = Tables()
    tables.load("a@1")
    request = GenerationRequest("r", np.arange(3, dtype=np.int32), SamplingParams(), adapter="a")
    keyed = with_key(request, tables.table, merged="m")
    assert keyed.adapter == "a@1" and keyed.version_label("7") == "7+a@1"
    merged = GenerationRequest("r", np.arange(3, dtype=np.int32), SamplingParams(), adapter="m")
    assert with_key(merged, tables.table, merged="m").adapter == ""
    assert with_key(merged, None, merged="m").version_label("7") == "7"
    for table in (None, tables.table):
        with pytest.raises(UnknownAdapterError):
            with_key(merged, table, merged="")


def test_sequences_of_more_adapters_than_a_step_has_wait_and_do_not_starve():
    tables = Tables(num_slots=2)
    tables.load("a@1", "b@1", "c@1")
    first = [of("a@1", "first"), of("b@1", "second")]
    for sequence in first:
        tables.turns.begin(sequence)
    third = of("c@1", "third")
    tables.scheduler.add([third])
    num_later = 40
    for number in range(num_later):  # later requests of resident adapters would pass it for ever
        tables.scheduler.add([of("a@1", f"later {number}")])
    planned = [tables.turns.turn() for _ in range(3)]
    assert all("third/0" not in step for step in planned[:1])
    running = {sequence.request.adapter for sequence in tables.scheduler.running}
    assert len(running) <= 2
    tables.turns.finish()
    assert third.finish is not None and third.queue.num_passed_over <= PASSES_PER_WAITING * (1 + num_later)


def test_prefixes_are_those_of_one_adapter_and_its_bytes():
    tables = Tables(num_slots=4)
    tables.load("a@1")
    found = {}
    for key in ("", "a@1", "a@2", "", "a@1", "a@2"):
        sequence = one(f"{key} {len(found)}", 13, num_new=1)
        object.__setattr__(sequence.request, "adapter", key)
        tables.scheduler.add([sequence])
        tables.turns.finish()
        found.setdefault(key, []).append(sequence.cache.num_cached)
    assert found == {key: [0, 12] for key in ("", "a@1", "a@2")}
