"""Laws over hosts and transports: the same ids, log-probs and routing as in one process."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.cluster.step_transport import TRANSPORTS, CompiledGraph, StepTransport
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.execution.served_model import runner_settings
from rayserve_moe.requests.records import GenerationRequest, ModelCard, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.support.engine.outputs import LOGPROB_TOLERANCE, assert_same_index
from tests.support.experts.placements import random_placement

PROMPTS = [
    np.random.default_rng(seed).integers(3, 500, length).astype(np.int32) for seed, length in enumerate((1, 40, 90))
]
SAMPLING = [
    SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
    SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True),
]

REPLACED_WITHIN_S = 600.0
"""Deadline for requests whose host is replaced under them: it took 48 s on two cores that others loaded."""


class OverTransport:
    """An executor over workers that are already running, with a transport (or a whole group) of one's choice."""

    def __init__(self, transport: StepTransport, num_pages: int, **reported: Any) -> None:
        self.transport, self._report = transport, StartReport(num_pages, **reported)

    def start(self) -> StartReport:
        return self._report

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self.transport.execute(plan)

    def release(self) -> None:
        self.transport.release()

    def shutdown(self) -> None:
        self.transport.release()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[tuple[ModelCard, list[ChoiceResult]]]:
    with Engine(str(checkpoint), **SETTINGS) as engine:
        yield engine.card, complete(engine.loop, engine.tokenizer)


@pytest.fixture(scope="module")
def group(raylets: int, checkpoint: Path, programs: Path) -> Iterator[tuple[GroupExecutor, int]]:
    with two_hosts(checkpoint, compile_cache=programs) as running:
        yield running


@contextmanager
def two_hosts(checkpoint: Path, **changes: object) -> Iterator[tuple[GroupExecutor, int]]:
    """A group of two hosts with two devices each, and its number of pages."""
    with starting_hosts(checkpoint, **changes) as executor:
        yield executor, executor.start().num_pages


@contextmanager
def starting_hosts(checkpoint: Path, **changes: object) -> Iterator[GroupExecutor]:
    """A group that is yet to be started."""
    values = {"model_path": str(checkpoint), "num_hosts": 2, "devices_per_host": 2, **SETTINGS, **changes}
    settings = settings_from(values)
    executor = GroupExecutor(
        runner_settings(settings, settings.model),
        parallel=settings.parallel,
        cluster=settings.cluster,
    )
    try:
        yield executor
    finally:
        executor.shutdown()


def loop_over(
    executor: OverTransport,
    card: ModelCard,
    *,
    num_data_ranks: int = 1,
    balancing: BalancingSettings | None = None,
    rebuilder: GroupExecutor | None = None,
) -> EngineLoop:
    settings = settings_from({"model_path": "unused", **SETTINGS})
    wanted = replace(
        settings,
        balancing=balancing or settings.balancing,
        parallel=replace(settings.parallel, data_parallel_size=num_data_ranks, num_hosts=2),
        cluster=replace(settings.cluster, idle_release_s=0.2, max_rebuilds_in_10_minutes=1000),
    )
    return EngineLoop(executor, card, settings=wanted, rebuilder=rebuilder)


@contextmanager
def running(executor: OverTransport, card: ModelCard, **changes: Any) -> Iterator[EngineLoop]:
    """A loop that is shut down in the end."""
    loop = loop_over(executor, card, **changes)
    try:
        yield loop
    finally:
        loop.shutdown()


def transport_to(group: GroupExecutor, name: str) -> StepTransport:
    return TRANSPORTS[name](group.workers, timeout_s=60.0)


def assert_nothing_was_compiled(group: GroupExecutor) -> None:
    """Since the start of its two hosts."""
    assert ray.get([worker.num_compilations_since_start.remote() for worker in group.workers]) == [0, 0]


def complete(
    loop: EngineLoop,
    tokenizer: Tokenizer,
    *,
    which: Sequence[int] = range(len(PROMPTS)),
    returns_routing: bool = True,
    adapters: Sequence[str] = ("",),
) -> list[ChoiceResult]:
    """Return the answers of prompts that use the `adapters` in turn."""
    requests = [
        GenerationRequest(
            f"{i}-{time.monotonic_ns()}",
            PROMPTS[i],
            SAMPLING[i],
            return_routed_experts=returns_routing,
            return_indexer_topk=loop.card.index is not None,
            adapter=adapters[i % len(adapters)],
        )
        for i in which
    ]
    streams = [GenerationStream(loop, tokenizer, request=request) for request in requests]
    results = [ChoiceResult() for _ in streams]
    for stream, result in zip(streams, results, strict=True):
        for delta in stream:
            result.add(delta)
    loop.check_integrity()
    assert loop.statistics()["pages_free"] == loop.statistics()["pages_total"]
    return results


def assert_same(
    results: list[ChoiceResult], expected: list[ChoiceResult], *, tolerance: float = LOGPROB_TOLERANCE
) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance)
        assert ours.routing is not None and theirs.routing is not None
        assert ours.routing.missing == ()
        np.testing.assert_array_equal(ours.routing.rows, theirs.routing.rows)
        assert (ours.routing.index is None) == (theirs.routing.index is None)
        assert_same_index(ours.routing, theirs.routing)


def test_hosts_lie_on_different_raylets(group: tuple[GroupExecutor, int]) -> None:
    executor, _ = group
    nodes = ray.get(
        [w.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()) for w in executor.workers]
    )
    assert len(set(nodes)) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "compiled_graph" else ()) for name in TRANSPORTS]
)
def test_two_hosts_answer_as_one_process(
    name: str, group: tuple[GroupExecutor, int], expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    executor, num_pages = group
    card, wanted = expected
    with running(OverTransport(transport_to(executor, name), num_pages), card) as loop:
        assert_same(complete(loop, Tokenizer(checkpoint)), wanted)


@pytest.mark.slow
def test_a_compiled_graph_answers_as_one_process_and_is_gone_when_idle(
    group: tuple[GroupExecutor, int], expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    executor, num_pages = group
    card, wanted = expected
    transport = CompiledGraph(executor.workers, timeout_s=60.0)
    deadline = time.monotonic() + 600
    while not transport.is_compiled:
        assert time.monotonic() < deadline, "the graph was never compiled"
        transport.execute(StepPlan(0))
    with running(OverTransport(transport, num_pages), card) as loop:
        assert_same(complete(loop, Tokenizer(checkpoint)), wanted)
        while transport.is_compiled:
            assert time.monotonic() < deadline, "the graph outlives the work"
            time.sleep(0.05)
        assert_same(complete(loop, Tokenizer(checkpoint)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["all_to_all", "replicated"])
def test_two_data_ranks_on_two_hosts_answer_as_one_process(
    backend: str, raylets: int, expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    """Two data ranks of two devices each, a host per rank; experts lie over all four, so tokens cross hosts."""
    card, wanted = expected
    with two_hosts(checkpoint, data_parallel_size=2, expert_backend=backend) as (executor, num_pages):
        for name in TRANSPORTS:
            with running(OverTransport(transport_to(executor, name), num_pages), card, num_data_ranks=2) as loop:
                assert_same(complete(loop, Tokenizer(checkpoint)), wanted)
        assert_nothing_was_compiled(executor)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["all_to_all", "fused"])
def test_experts_move_between_hosts_while_these_answer_as_one_process(
    backend: str, raylets: int, expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    card, wanted = expected
    balancing = BalancingSettings(enabled=True, slots_per_step=1)
    changes = {"enable_eplb": True, "eplb_slots_per_step": 1, "num_redundant_experts": 4, "expert_backend": backend}
    with two_hosts(checkpoint, data_parallel_size=2, **changes) as (executor, num_pages):
        for name in TRANSPORTS:
            over = OverTransport(transport_to(executor, name), num_pages, num_expert_ranks=4, num_redundant_experts=4)
            with running(over, card, num_data_ranks=2, balancing=balancing) as loop:
                assert loop.eplb is not None
                migration = loop.eplb.migration
                start = migration.placement
                for seed in range(3):
                    loop.eplb.set_target(random_placement(start, seed))
                    assert_same(complete(loop, Tokenizer(checkpoint)), wanted)
                    assert migration.progress.version == seed + 1 and migration.progress.num_slots_done > 0
                loop.eplb.set_target(start)
                deadline = time.monotonic() + 600
                while migration.progress.version < 4 or not migration.progress.is_done:
                    assert time.monotonic() < deadline, "experts never arrive"
                    assert_same(complete(loop, Tokenizer(checkpoint)), wanted)
        assert_nothing_was_compiled(executor)


@pytest.mark.slow
def test_experts_with_limited_room_choose_over_two_hosts_as_in_one_process(raylets: int, checkpoint: Path) -> None:
    """One request after the other, so that in both the same tokens compete for the same room."""
    limited = {
        "expert_selection": "balanced",
        "capacity_factor": 1.0,
        "data_parallel_size": 2,
        "enable_return_routed_experts": False,
        "expert_backend": "all_to_all",
        "num_redundant_experts": 4,
    }

    def answers(loop: EngineLoop) -> tuple[list[ChoiceResult], float]:
        found = [
            complete(loop, Tokenizer(checkpoint), which=[i], returns_routing=False)[0] for i in range(len(PROMPTS))
        ]
        return found, loop.statistics()["picks_kept_share"]

    with Engine(str(checkpoint), **{**SETTINGS, **limited}, devices_per_host=4) as engine:
        card, (wanted, share) = engine.card, answers(engine.loop)
    assert 0 < share < 1, "room was never short"
    with two_hosts(checkpoint, **limited) as (executor, num_pages):
        over = OverTransport(transport_to(executor, "sockets"), num_pages, num_expert_ranks=4, num_redundant_experts=4)
        with running(over, card, num_data_ranks=2) as loop:
            found, share_of_hosts = answers(loop)
    assert share_of_hosts == share
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_no_host_compiles_after_the_start(group: tuple[GroupExecutor, int]) -> None:
    assert_nothing_was_compiled(group[0])


def test_no_host_collects_what_it_has_loaded(group: tuple[GroupExecutor, int]) -> None:
    """To walk all of it would stop a host, and with it every request, for 0.2 s."""
    executor, _ = group
    counts = ray.get([w.__ray_call__.remote(lambda self: gc.get_freeze_count()) for w in executor.workers])
    assert min(counts) > 100_000


def test_requests_outlive_a_host_that_is_killed_under_them(
    group: tuple[GroupExecutor, int], expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    """Their streams go on with the same tokens, log-probs and rows, by other workers on both raylets."""
    executor, num_pages = group
    card, wanted = expected
    lost = list(executor.workers)
    pid = ray.get(lost[1].__ray_call__.remote(lambda self: os.getpid()))
    with running(OverTransport(executor, num_pages), card, rebuilder=executor) as loop:
        step = loop.statistics()["steps"]
        with ThreadPoolExecutor(1) as beside:
            found = beside.submit(complete, loop, Tokenizer(checkpoint))
            while loop.statistics()["steps"] < step + 5:
                assert not found.done(), found.exception()
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
            assert_same(found.result(REPLACED_WITHIN_S), wanted)
        assert loop.recovery is not None and loop.recovery.num_rebuilds == 1
        assert loop.recovery.num_carried > 0 and executor.workers != lost
        assert_same(complete(loop, Tokenizer(checkpoint)), wanted)


def test_a_lost_host_ends_requests_with_an_error_and_the_engine_says_so(
    group: tuple[GroupExecutor, int], expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path
) -> None:
    """It leaves the group without a host."""
    executor, num_pages = group
    card, _ = expected
    loop = loop_over(OverTransport(executor, num_pages), card)
    request = GenerationRequest("doomed", PROMPTS[0], SamplingParams(max_new_tokens=200, ignore_eos=True))
    stream = GenerationStream(loop, Tokenizer(checkpoint), request=request)
    deltas = iter(stream)
    assert next(deltas).finish is None
    ray.kill(executor.workers[1])
    finish = [delta.finish for delta in deltas if delta.finish][-1]
    assert finish is not None and finish.kind == "error"
    with pytest.raises(EngineStoppedError):
        loop.check_health()
    loop.shutdown()


def restarted(checkpoint: Path, programs: Path, expected: tuple[ModelCard, list[ChoiceResult]]) -> StartReport:
    """Start a group anew, which answers as one process and compiles nothing more; returns its report."""
    card, wanted = expected
    with starting_hosts(checkpoint, compile_cache=programs) as executor:
        report = executor.start()
        with running(OverTransport(executor, report.num_pages), card) as loop:
            assert_same(complete(loop, Tokenizer(checkpoint)), wanted)
            assert_nothing_was_compiled(executor)
    return report


def test_the_next_group_finds_the_programs_of_every_host_and_answers_as_one_process(
    group: object, expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path, programs: Path
) -> None:
    """After a host was lost, too."""
    report = restarted(checkpoint, programs, expected)
    assert report.num_programs_found == report.num_programs > 0


@pytest.mark.slow
def test_a_host_that_lacks_a_program_compiles_it_while_the_others_wait(
    group: object, expected: tuple[ModelCard, list[ChoiceResult]], checkpoint: Path, programs: Path
) -> None:
    largest = max((programs / "executables" / "1-of-2").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    report = restarted(checkpoint, programs, expected)
    assert report.num_programs_found == report.num_programs - 1
    report = restarted(checkpoint, programs, expected)
    assert report.num_programs_found == report.num_programs
