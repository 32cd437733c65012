"""Streams end their own choices and nobody else's, as soon as the text is complete, whether or not anybody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from rayserve_moe.config.settings import CacheSettings, ClusterSettings, SchedulerSettings, Settings
from rayserve_moe.engine import output_dispatch
from rayserve_moe.engine.control import ABORTED
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.inprocess.running import RunningRequest, run_to_end
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.devices.counting_executor import CARD, ROUTING, CountingExecutor

NUM_REQUESTS = 31
NUM_NEW = 60
IN_FLIGHT = 2
"""Samples that may follow on a choice's last token: of the step that was submitted before, and of the one before it."""
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 270)
    return Tokenizer(path)


@pytest.fixture(params=[True, False], ids=["overlapping", "one by one"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLoop]:
    """Its clients hear of every token at once; more is asked of it than it runs, or takes."""
    monkeypatch.setattr(output_dispatch, "MAX_GROUPING_S", 0.0)
    limits = SchedulerSettings(max_running_requests=8, max_waiting_requests=16, overlap_steps=request.param)
    cluster = ClusterSettings(idle_release_s=0.01)
    settings = Settings(scheduler=limits, cache=CacheSettings(page_size=4), cluster=cluster)
    card = replace(CARD, routing=ROUTING, returns_routing=True)
    running = EngineLoop(CountingExecutor(num_pages=1024), card, settings=settings)
    yield running
    running.shutdown()


def stopping(tokenizer: Tokenizer, index: int, *, name: str = "r", n: int = 1) -> GenerationRequest:
    """Spells the characters after a letter; the stop string is two of them, that end 2 to 13 tokens later."""
    (first,) = tokenizer.encode(chr(ord("A") + index))
    stop = tokenizer.decode([first + 1 + index % 12, first + 2 + index % 12])
    sampling = SamplingParams(max_new_tokens=NUM_NEW, stop=(stop,), n=n, seed=1)
    return GenerationRequest(f"{name}{index}", np.array([first], np.int32), sampling)


def check(loop: EngineLoop, running: list[RunningRequest]) -> None:
    """Every choice has ended with its stop string, and hardly anything was sampled after it."""
    results = [result for one in running for result in one.results]
    assert all(result.finish is not None and result.finish.kind == "stop" for result in results)
    for index, one in enumerate(running):
        assert all(len(result.token_ids) == 2 + index % 12 for result in one.results)
    num_returned = sum(len(result.token_ids) for result in results)
    loop.check_integrity()
    assert num_returned <= loop.statistics()["tokens_sampled"] <= num_returned + IN_FLIGHT * len(results)


def test_a_batch_samples_hardly_more_than_it_returns(loop: EngineLoop, tokenizer: Tokenizer):
    requests = [stopping(tokenizer, i, n=1 + (i % 7 == 0)) for i in range(NUM_REQUESTS)]
    check(loop, run_to_end(loop, tokenizer, requests=requests, shows_progress=False))


def test_a_stop_string_ends_its_choice_though_nobody_reads(loop: EngineLoop, tokenizer: Tokenizer):
    running = [RunningRequest(loop, tokenizer, request=stopping(tokenizer, i)) for i in range(16)]
    for _ in range(TIMEOUT_S * 100):
        if loop.is_idle:
            break
        loop.check_integrity()
    assert loop.is_idle, "a choice waits for its reader"
    for one in running:
        one.wait()
    check(loop, running)


def test_an_event_loop_finds_what_a_thread_finds(loop: EngineLoop, tokenizer: Tokenizer):
    running = [RunningRequest(loop, tokenizer, request=stopping(tokenizer, i)) for i in range(16)]

    async def wait_for_all() -> None:
        await asyncio.gather(*(one.wait_async() for one in running))

    asyncio.run(wait_for_all())
    check(loop, running)


def test_whatever_ends_a_choice_while_it_is_retracted_it_has_its_rows(loop: EngineLoop, tokenizer: Tokenizer):
    """Half of them are left by their clients, and the others by nobody."""
    sampling = SamplingParams(max_new_tokens=80, seed=1, ignore_eos=True)
    prompts = [np.arange(100 * i, 100 * i + 9, dtype=np.int32) for i in range(8)]
    running = [
        RunningRequest(loop, tokenizer, request=GenerationRequest(f"r{i}", ids, sampling, return_routed_experts=True))
        for i, ids in enumerate(prompts)
    ]
    while (found := loop.statistics())["tokens_sampled"] < 16 or found["requests_running"] < len(prompts):
        loop.check_integrity()
    loop.control.pause("retract").result(TIMEOUT_S)
    for one in running[::2]:
        one.stream.close()
        one.wait()
    loop.control.resume()
    for one in running:
        one.wait()
        (result,) = one.results
        assert result.routing is not None and result.routing.missing == ()
        assert result.routing.rows[:, 0, 0].tolist() == list(range(8 + len(result.token_ids)))
    assert {result.finish for one in running[::2] for result in one.results} <= {ABORTED, FinishReason("length")}


@pytest.mark.parametrize("is_read", [True, False])
def test_closing_a_stream_leaves_the_next_request_of_its_id_alone(
    loop: EngineLoop, tokenizer: Tokenizer, is_read: bool
):
    wanted = stopping(tokenizer, 3, name="again")
    first = GenerationStream(loop, tokenizer, request=wanted)
    while not loop.is_idle:
        loop.check_integrity()
    long = replace(wanted, sampling=SamplingParams(max_new_tokens=NUM_NEW, seed=1))
    second = GenerationStream(loop, tokenizer, request=long)
    if is_read:
        first.drain_ready()
    first.close()
    *_, last = second
    assert last.finish == FinishReason("length")


def test_closing_a_stream_ends_all_of_its_own(loop: EngineLoop, tokenizer: Tokenizer):
    endless = GenerationRequest("endless", np.array([7], np.int32), SamplingParams(max_new_tokens=90, n=3, seed=1))
    stream = GenerationStream(loop, tokenizer, request=endless)
    stream.close()
    ended = [delta.finish for delta in stream if delta.finish is not None]
    assert len(ended) == 3
    loop.check_integrity()
    assert loop.statistics()["pages_free"] == loop.statistics()["pages_total"]
