"""What the benchmarks count is what was done, and a run that did anything else is refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.conversations import check_computed, fewest_computed, replay
from benchmarks.device_wait import StepSpan, StepWatch, waited_seconds
from benchmarks.engine import check_same, routing_arrays
from benchmarks.engine_runs import check_routing, in_turn, run_engine
from benchmarks.load_curve import DecodeWindow, decode_together
from benchmarks.rebalance import window
from benchmarks.workloads import Workload
from rayserve_moe.config.settings import ClusterSettings, SchedulerSettings, Settings
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.requests.results import ChoiceResult
from tests.support.devices.counting_executor import CARD, CountingExecutor


@pytest.fixture
def executor():
    return CountingExecutor()


@pytest.fixture
def counting_loop(executor):
    scheduler, cluster = SchedulerSettings(max_running_requests=8), ClusterSettings(idle_release_s=60)
    settings = Settings(scheduler=scheduler, cluster=cluster)
    loop = EngineLoop(executor, CARD, settings=settings)
    yield loop
    loop.shutdown()


def test_devices_wait_from_a_steps_end_to_the_next_ones_start():
    spans = [StepSpan(0.0, 1.0), StepSpan(0.5, 2.0), StepSpan(2.25, 3.0), StepSpan(3.5, 4.0)]
    assert waited_seconds(spans) == pytest.approx(0.25 + 0.5)
    assert waited_seconds(spans[:2]) == waited_seconds(spans[:1]) == waited_seconds([]) == 0


def test_a_watched_run_leaves_a_span_per_step_and_the_programs_as_they_were(engine):
    plain = dict(engine.runner.programs.steps)
    workload = Workload(3, 20, 6)
    prompts = [[5 + i] * 20 for i in range(3)]
    with StepWatch(engine.runner.programs) as watch:
        run, _ = run_engine(engine, workload, prompts=prompts, seed=0)
    assert len(watch.spans) == run["steps"]
    assert all(span.started < span.ready for span in watch.spans)
    assert all(a.started < b.started and a.ready <= b.ready for a, b in zip(watch.spans, watch.spans[1:], strict=False))
    assert engine.runner.programs.steps == plain


def test_a_run_returns_the_ids_that_came_out_and_its_share_of_the_clock(engine):
    workload, prompts = Workload(2, 18, 5, n=2), [[7] * 18, [8] * 18]
    run, ids = run_engine(engine, workload, prompts=prompts, seed=3, return_routed_experts=True)
    again, same_ids = run_engine(engine, workload, prompts=prompts, seed=3)
    assert ids == same_ids
    assert [len(one) for one in ids] == [5] * 4
    for each in (run, again):
        assert 5 <= each["steps"] <= 2 * 5, "the second request may come any number of steps after the first"
        assert 0 < each["device_s"] < each["seconds"]


def test_routing_of_another_size_is_refused():
    check_routing(24, 24)
    with pytest.raises(RuntimeError, match="23 expert ids, not 24"):
        check_routing(23, 24)


def test_every_side_comes_first_in_its_turn():
    turns = [in_turn(["a", "b", "c"], turn) for turn in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_sides_with_the_same_prompts_must_agree():
    ids = {"plain": [[1, 2], [3]], "no_overlap": [[1, 2], [3]], "routing_unasked": [[9], [9]]}
    check_same(ids)
    with pytest.raises(RuntimeError, match="1 outputs of routing_returned"):
        check_same({**ids, "routing_returned": [[1, 2], [4]]})


def test_routing_in_a_program_is_found_by_its_shape():
    layout = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=4)
    program = "a = u8[2,16,4]{2,1,0} convert(s32[2,16,4]{2,1,0} b)\nc = f32[2,16,48] d"
    assert routing_arrays(program, layout, num_tokens=16) == 2
    assert routing_arrays(program, layout, num_tokens=32) == 0


def test_a_turn_computes_what_whole_pages_cannot_give():
    assert fewest_computed(100, 0, page_size=16) == 100
    assert fewest_computed(100, 47, page_size=16) == 100 - 32
    assert fewest_computed(100, 47, page_size=1) == 53
    assert fewest_computed(48, 48, page_size=16) == 16, "the last prompt token is always computed"


def test_a_conversation_computes_no_more_than_it_must(engine):
    run = replay(engine, num_conversations=2, num_turns=3, seed=0)
    assert run["computed"] == run["ideal"] < run["prompt_tokens"]
    assert run["ideal_unpaged"] <= run["ideal"]


def test_answers_and_steps_must_agree_on_what_was_computed():
    check_computed(10, 10)
    with pytest.raises(RuntimeError, match="steps computed 11 prompt tokens, the answers say 10"):
        check_computed(11, 10)


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_a_window_counts_the_steps_in_which_all_decode(counting_loop, executor, num_sequences):
    executor.may_step.clear()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(decode_together, counting_loop, num_sequences, num_new_tokens=40, seed=1)
        while not running.done() and counting_loop.statistics()["requests_live"] < num_sequences:
            time.sleep(0.001)
        executor.may_step.set()
        run = running.result()
    assert 0 < run["steps"] < 40
    assert run["tokens_sampled"] == num_sequences * run["steps"]
    assert run["seconds"] > 0


def test_a_window_of_moves_is_held_against_the_quiet_steps_around_it():
    moving = window([0.25, 0.75], [0.25, 0.25, 0.5], num_slots=7)
    assert (moving["steps"], moving["slots"], moving["seconds"], moving["busy_step_s"]) == (2, 7, 1.0, 0.5)
    assert (moving["longest_gap"], moving["longest_quiet_gap"]) == (3.0, 2.0)


def test_sequences_that_never_ran_together_are_refused(counting_loop):
    window = DecodeWindow(counting_loop, 2)
    for request_id in ("a", "b"):
        window.receive([ChoiceResult(request_id, 0, [1], [0.0], finish=FinishReason("length"))])
    with pytest.raises(RuntimeError, match="2 sequences never ran together"):
        window.result()
