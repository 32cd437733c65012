"""Streamed routing: every update brings the rows that go with its tokens, and together they are the one-shot rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.output_dispatch import OutputDispatch
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts
from rayserve_moe.requests.results import ChoiceResult, joined_routing
from tests.support.engine.outputs import Outcomes
from tests.support.engine.run_requests import Way, choices_of, cycle_for, preempt_every, run_alone
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for

WAYS = {
    "together": Way(),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "preemption every 3 steps": Way(intervene=preempt_every(3)),
    "preemption every 4 steps, all forgotten": Way(chunk_tokens=64, intervene=preempt_every(4, forgets=True)),
    "pages for two long sequences": Way(num_pages=29),
    "one step after the other": Way(overlaps=False, intervene=preempt_every(7)),
}


def streamed(request: GenerationRequest) -> GenerationRequest:
    return replace(request, stream_routed_experts=True)


def workload() -> list[GenerationRequest]:
    return mixed_workload()[4:]


@pytest.fixture(scope="module")
def one_shot(engine: Engine) -> Outcomes:
    return run_alone(engine.runner, engine.card, workload())


def updates_of(engine: Engine, way: Way) -> dict[tuple[str, int], list[ChoiceResult]]:
    """Run the workload; returns the updates of every choice, one for every turn that brought it something."""
    cycle = cycle_for(engine.runner, engine.card, way)
    capture = extension_of(cycle.extensions, RoutingCapture)
    assert capture is not None, "the cycle captures routing"
    outputs = OutputDispatch(cycle.scheduler.table, streamed_routing=capture.streamed)
    updates: dict[tuple[str, int], list[ChoiceResult]] = {}

    def receive(news: list[ChoiceResult]) -> None:
        for update in news:
            updates.setdefault((update.request_id, update.choice_index), []).append(update)

    for request in workload():
        choices = choices_of(streamed(request), engine.card)
        outputs.add(choices, receive)
        cycle.scheduler.add(choices)
    step = 0
    while cycle.has_work:
        step += 1
        outputs.publish(*cycle.run(), now=float(step))
        if way.intervene is not None:
            way.intervene(cycle, step)
    cycle.scheduler.flush()
    return updates


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_pieces_join_to_the_one_shot_rows_and_none_is_late(engine: Engine, one_shot: Outcomes, way: Way):
    updates = updates_of(engine, way)
    assert updates.keys() == one_shot.keys()
    for request in workload():
        for choice in range(request.sampling.n):
            whole: RoutedExperts | None = None
            num_tokens = len(request.prompt_ids)
            for update in updates[request.request_id, choice]:
                num_tokens += len(update.token_ids)
                assert update.routing is not None
                whole = joined_routing([whole, update.routing])
                assert whole is not None and whole.start == 0
                has_outputs = num_tokens > len(request.prompt_ids)
                assert len(whole.rows) == num_tokens - has_outputs, "of every token but the last"
            expected = one_shot[request.request_id, choice]
            assert whole is not None and whole.missing == ()
            assert whole.rows.tobytes() == expected.rows.tobytes()
            assert whole.weight_version == ((0, len(whole.rows), "0"),)
            assert whole.source[-1][1] == len(whole.rows)
    assert max(len(pieces) for pieces in updates.values()) > 10


def collect(engine: Engine, request: GenerationRequest, *, abort_after: int = 10**6) -> ChoiceResult:
    """Run a request with one choice through the engine's thread; rows must keep up with the tokens of every delta."""
    result = ChoiceResult()
    for delta in GenerationStream(engine.loop, engine.tokenizer, request=request):
        result.add(delta)
        if request.stream_routed_experts and result.routing is not None and result.token_ids:
            assert len(result.routing.rows) == len(request.prompt_ids) + len(result.token_ids) - 1
        if len(result.token_ids) >= abort_after and delta.finish is None:
            engine.loop.abort_stem(request.request_id)
    return result


def test_a_stop_string_ends_streamed_rows_with_its_token(engine: Engine):
    prompt = draw_prompt(np.random.default_rng(6), 40)
    free = collect(engine, request_for(prompt, "free", max_new_tokens=60))
    stop = free.text[len(free.text) // 2 :][:4]
    request = request_for(prompt, max_new_tokens=60, stop=(stop,))
    whole, pieces = collect(engine, request), collect(engine, streamed(request))
    assert whole.finish == pieces.finish and whole.finish is not None and whole.finish.matched == stop
    assert whole.routing is not None and pieces.routing is not None
    assert len(whole.routing.rows) == len(prompt) + len(whole.token_ids) - 1
    assert pieces.routing.rows.tobytes() == whole.routing.rows.tobytes()


def test_an_abort_brings_the_rest(engine: Engine):
    request = request_for(draw_prompt(np.random.default_rng(7), 50), max_new_tokens=400)
    aborted = collect(engine, streamed(request), abort_after=20)
    assert aborted.finish is not None and aborted.finish.kind == "abort" and 20 <= len(aborted.token_ids) < 400
    assert aborted.routing is not None and aborted.routing.missing == ()
    count = len(aborted.token_ids)
    whole = collect(engine, replace(request, sampling=replace(request.sampling, max_new_tokens=count)))
    assert whole.routing is not None and whole.token_ids == aborted.token_ids
    assert aborted.routing.rows.tobytes() == whole.routing.rows.tobytes()
