"""Pages from host memory are those that were evicted: ids, log-probs and rows of later turns are the same bits.

What they are held to is the same turns in a pool where nothing is cached. One family of each kind of state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.scheduling.scheduler import change_weights
from rayserve_moe.scheduling.step_plan import HostSizes
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.host_runners import TWO_SHAPES, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import Way, cycle_for, kept_tokens, preempt_every, run_on
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import family_case, write_family

NUM_SESSIONS, PROMPT, ANSWER, MORE = 6, 150, 24, 20
TIGHT = 45
"""Pages for three sessions."""
HOSTED = HostSizes(100, 40)
WAY = Way(num_rows=4, step_tokens=32, chunk_tokens=32, num_pages=TIGHT, hosted=HOSTED)
WAYS = {"overlapping": WAY, "preempted": replace(WAY, overlaps=False, intervene=preempt_every(9))}
UNCACHED = Way(num_rows=4, step_tokens=32, chunk_tokens=32, caches_prefixes=False)
NATIVE = {"dtype": "bfloat16", "cpu_kernels": "native", "enable_return_routed_experts": True}
Turns = list[tuple[list[GenerationRequest], Outcomes]]
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3_moe-0", "deepseek_v3-0", "gpt_oss-0", "deepseek_v32-0", "nemotron_h-0")
]


@pytest.fixture(scope="module", params=["qwen3_5_moe_text-0", *SLOW])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    case = family_case(request.param)
    return write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype="bfloat16")


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> HostRunner:
    return prepared_runner(checkpoint, **TWO_SHAPES, **NATIVE, host_cache_mib=64)


def turns_of(prompts: Iterable[list[int]], turn: int) -> list[GenerationRequest]:
    """Return requests of which every second one is greedy."""
    return [
        request_for(prompt, f"{i}", max_new_tokens=ANSWER, temperature=float(i % 2), seed=10 * turn + i)
        for i, prompt in enumerate(prompts)
    ]


def first_turns() -> list[GenerationRequest]:
    generator = np.random.default_rng(4)
    return turns_of([draw_prompt(generator, PROMPT).tolist() for _ in range(NUM_SESSIONS)], 0)


def next_turns(before: list[GenerationRequest], answers: Outcomes, turn: int) -> list[GenerationRequest]:
    generator = np.random.default_rng(turn)
    prompts = [
        [*request.prompt_ids.tolist(), *answers[request.request_id, 0].ids, *draw_prompt(generator, MORE).tolist()]
        for request in before
    ]
    return turns_of(prompts, turn)


def statistics_of(cycle: StepCycle) -> dict[str, float]:
    hosted = extension_of(cycle.extensions, HostedPages)
    assert hosted is not None, "pages are kept in host memory"
    return hosted.statistics()


@pytest.fixture(scope="module")
def turns(runner: HostRunner, card: ModelCard) -> Turns:
    """Return three turns of all sessions, and the outcome of each without any cached page."""
    found, requests = [], first_turns()
    for turn in range(1, 4):
        found.append((requests, run_on(cycle_for(runner, card, UNCACHED), card, requests)))
        requests = next_turns(requests, found[-1][1], turn)
    return found


def hosted_cycle(runner: HostRunner, card: ModelCard, way: Way = WAY) -> StepCycle:
    """Return a cycle over few pages that restores every page that it finds."""
    cycle = cycle_for(runner, card, way)
    for rank in cycle.scheduler.ranks:
        assert rank.host is not None
        rank.host.pays = lambda _: True
    return cycle


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_later_turns_find_the_bits_that_were_evicted(runner: HostRunner, card: ModelCard, turns: Turns, way: Way):
    """A prompt finds all its whole pages up to the last one after which every kind of state is kept."""
    kept, cycle = kept_tokens(runner), hosted_cycle(runner, card, way)
    for requests, expected in turns:
        found = run_on(cycle, card, requests, intervene=way.intervene)
        assert_identical(found, expected)
        cycle.scheduler.check_integrity()
    for request in requests:
        before = len(request.prompt_ids) - MORE - 1  # the last token of an answer has no keys
        assert found[request.request_id, 0].num_cached == before // kept * kept
    statistics = statistics_of(cycle)
    assert statistics["host_pages_restored"] >= NUM_SESSIONS * 10, "the pool has not turned over"
    assert statistics["host_pages_without_rows"] == 0
    cycle.scheduler.flush()


def test_an_update_drops_pages_in_host_memory_and_on_their_way(runner: HostRunner, card: ModelCard, turns: Turns):
    cycle = hosted_cycle(runner, card)
    run_on(cycle, card, turns[0][0])
    versions = iter(range(1, 100))

    def update(cycle: StepCycle, step: int) -> None:
        if step in (2, 3, 11):
            cycle.drain()
            change_weights(cycle.scheduler, str(next(versions)))
            cycle.scheduler.check_integrity()
            assert statistics_of(cycle)["host_pages_used"] == 0

    for requests, expected in turns[1:]:
        assert_identical(run_on(cycle, card, requests, intervene=update), expected)
    assert next(versions) == 7, "an update has not come"
    cycle.scheduler.flush()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_every_device_keeps_its_own_share(checkpoint: Path, card: ModelCard, mesh: tuple[int, int]):
    runner = prepared_runner(checkpoint, mesh=mesh, **TWO_SHAPES, **NATIVE, host_cache_mib=64)
    cycle, requests = hosted_cycle(runner, card, replace(WAY, num_rows=16, num_pages=TIGHT // mesh[0])), first_turns()
    expected = run_on(cycle_for(runner, card, replace(UNCACHED, num_rows=16)), card, requests)
    for _ in range(3):
        assert_identical(run_on(cycle, card, requests), expected)
    assert statistics_of(cycle)["host_pages_restored"] > 0
    cycle.scheduler.flush()


@pytest.mark.slow
def test_an_engine_keeps_pages_in_host_memory_by_its_setting(engine_with: EngineStore):
    """The restored pages depend on the times of steps and copies; the answers do not."""
    engine = engine_with(**ONE_BUCKET, num_pages=TIGHT, host_cache_mib=16)
    generator = np.random.default_rng(2)
    prompts = [draw_prompt(generator, PROMPT).tolist() for _ in range(NUM_SESSIONS)]
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    first, *others = (
        [
            (answer["output_ids"], answer["meta_info"]["routed_experts"])
            for answer in engine.generate(input_ids=prompts, sampling_params=sampling, return_routed_experts=True)
        ]
        for _ in range(3)
    )
    assert others == [first, first]
    statistics = engine.loop.statistics()
    assert statistics["host_pages_used"] > 0
    assert statistics["host_pages_restored"] + statistics["host_pages_computed"] > 0
