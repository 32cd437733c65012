"""A simulated fleet does what its clock, its steps and its policy say, to the request and to the token."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.agent_sessions import LOADS, Load, sessions
from benchmarks.fleet_simulation import merged
from benchmarks.simulation.calibrate import fit
from benchmarks.simulation.client import hinted
from benchmarks.simulation.costs import MeasuredSteps, StepLoad, load_of
from benchmarks.simulation.fleet import POLICIES, Seen, simulate
from benchmarks.simulation.replica import NO_HINTS, SessionHints, SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, Shape, Turn, drawn, token_ids, traced
from rayserve_moe.scheduling.scheduler import StepLimits
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan

LIMITS = StepLimits(num_rows=4, step_tokens=256, chunk_tokens=64, page_size=16, num_pages=200, max_tokens=1024)
TIMES = MeasuredSteps(0.01, 0.001, 0.0, 0.0, 0.0002, 0.0, 0.005)
TURNS = Shape((60, 0.6), (12, 0.5), common=32, turns=3.0, gap_s=0.2, longest=900)
DRAWN = list(drawn(TURNS, rate=20.0, num_requests=60, seed=3))


def run(policy: str, conversations: list[Conversation] = DRAWN, *, num_replicas: int = 3) -> Seen:
    how = {"num_replicas": num_replicas, "request_s": TIMES.request_s}
    return simulate(policy, lambda: SimulatedReplica(LIMITS, TIMES), conversations, **how)


def alone(prompt: int, answer: int) -> Conversation:
    return Conversation(1.0, (Turn(((5, prompt),), answer),))


def test_a_request_alone_takes_the_steps_of_its_chunks_and_of_its_tokens() -> None:
    seen = run("prefix", [alone(100, 8)])
    (asked,) = seen.asked
    assert asked.first_at - asked.arrived_at == pytest.approx(0.005 + 2 * 0.01 + 100 * 0.0002)
    assert np.diff([asked.first_at, asked.last_at]) == pytest.approx(7 * 0.011)
    assert seen.gaps == pytest.approx([0.011] * 7)
    assert seen.ended_at == asked.last_at


def test_requests_that_come_together_share_steps() -> None:
    together = [replace(alone(10, 8), turns=(Turn(((seed, 10),), 8),)) for seed in range(4)]
    seen = run("round robin", together, num_replicas=1)
    assert {round(one.first_at, 6) for one in seen.asked} == {round(1.005 + 0.01 + 40 * 0.0002, 6)}
    # Four sequences have an event after 0.04 s, and at their end: after three steps, three more, and one.
    assert sorted(seen.gaps) == pytest.approx([0.014] * 4 + [0.042] * 8)


def test_a_turn_waits_for_the_subagents_that_it_calls_and_for_its_gap() -> None:
    called = tuple(replace(alone(20 * size, 8), turns=(Turn(((size, 20 * size),), 8),)) for size in (1, 2))
    for gap_s in (0.0, 50.0):
        caller = replace(alone(10, 2), turns=(Turn(((5, 10),), 2), Turn(((6, 10),), 2, gap_s, called)))
        seen = run("round robin", [caller], num_replicas=1)
        first, *ours, last = sorted(seen.asked, key=lambda asked: asked.arrived_at)
        assert [one.conversation for one in (first, last)] == [caller, caller] and {
            id(one.conversation) for one in ours
        } == set(map(id, called))
        assert {one.arrived_at for one in ours} == {first.last_at}
        assert last.arrived_at == pytest.approx(max(first.last_at + gap_s, *(one.last_at for one in ours)))
        assert caller.num_tokens == 24 + 60 + 16


def test_sessions_are_those_of_their_load() -> None:
    longest = SHAPES["agents"].longest
    plain, called, groups = (list(sessions(LOADS[name], 250, seed=1)) for name in ("agents", "subagents", "rollouts"))
    assert plain == list(sessions(Load((1,)), 250, seed=1)), "runs repeat"
    for found in (plain, called, groups):
        assert [one.starts_at for one in found] == sorted(one.starts_at for one in found)
        assert all(sum(t.num_tokens + t.num_answer for t in one.turns) <= longest for one in found)
    callers = [one for one in called if any(turn.calls for turn in one.turns)]
    assert 0.3 < len(callers) / len(called) < 0.5 and all(not one.turns[0].calls for one in callers)
    for place in range(0, 250, 8):
        group = groups[place : place + 8]
        assert len({(one.starts_at, one.turns[0].spans) for one in group}) == 1
        assert len({one.turns[1].spans for one in group if len(one.turns) > 1}) > 1
    assert len({one.turns[0].spans for one in groups}) == 32


def test_clients_send_the_hints_that_are_compared() -> None:
    session = Conversation(0.0, (Turn(((5, 10),), 2), Turn(((6, 10),), 2)))
    assert [hinted(session, turn, hints=NO_HINTS) for turn in (0, 1)] == [({}, {})] * 2
    (named, kept), (ended, left) = (hinted(session, turn, hints=SessionHints(True, True, 5.0)) for turn in (0, 1))
    assert list(named) == ["X-Session-Id"] and ended == {**named, "X-Dynamo-Session-Final": "true"}
    assert kept == {"nvext": {"cache_control": {"type": "ephemeral", "ttl": 5.0}}} and left == {}


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    late = replace(alone(10, 2), starts_at=1.0101, turns=(Turn(((9, 10),), 2),))
    seen = run("round robin", [alone(60, 3), late], num_replicas=1)
    first, second = sorted(seen.asked, key=lambda asked: asked.arrived_at)
    assert first.first_at == pytest.approx(1.005 + 0.01 + 60 * 0.0002)
    # Its step is planned when that one's results are there: one sequence decodes in it, beside its ten tokens.
    assert second.first_at == pytest.approx(first.first_at + 0.011 + 0.011 + 10 * 0.0002)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_turn_is_answered_once_and_runs_repeat(policy: str) -> None:
    seen, again = run(policy), run(policy)
    assert [(one.first_at, one.num_cached) for one in seen.asked] == [
        (one.first_at, one.num_cached) for one in again.asked
    ]
    turns = sorted((id(one.conversation), one.turn) for one in seen.asked)
    assert turns == sorted((id(one), turn) for one in DRAWN for turn in range(len(one.turns)))
    assert sum(seen.gaps) == pytest.approx(sum(one.last_at - one.first_at for one in seen.asked))
    for one in seen.asked:
        assert one.arrived_at < one.first_at <= one.last_at
        before = one.conversation.turns[: one.turn]
        assert (
            one.num_given
            == sum(t.num_tokens + t.num_answer for t in before) + one.conversation.turns[one.turn].num_tokens
        )


def test_prefixes_are_found_by_the_policy_that_looks_for_them() -> None:
    hits = {policy: run(policy).figures(ttft_s=1.0, tpot_s=0.1)["hits"] for policy in POLICIES}
    one = run("prefix", num_replicas=1).figures(ttft_s=1.0, tpot_s=0.1)["hits"]
    assert hits["prefix"] >= 0.95 * one > 1.2 * hits["round robin"] > 0


def test_figures_are_those_of_the_requests() -> None:
    turn = Conversation(0.0, (Turn(((1, 30),), 11),))
    seen = Seen(num_replicas=2, ended_at=5.0, gaps=[0.1] * 20)
    run("load", [turn])
    for late, gap in ((0.5, 0.1), (0.5, 0.3), (3.0, 0.1), (0.2, 0.05)):
        (asked,) = run("load", [turn]).asked
        seen.asked.append(replace(asked, arrived_at=0.0, first_at=late, last_at=late + 10 * gap, num_cached=15))
    figures = seen.figures(ttft_s=1.0, tpot_s=0.2)
    assert figures["good_share"] == 0.5 and figures["goodput_s"] == pytest.approx(2 / 10)
    assert figures["tokens_s"] == pytest.approx(44 / 10) and figures["hits"] == 0.5 and figures["computed"] == 60
    assert figures["ttft_p50_s"] == 0.5 and figures["tpot_p50_s"] == pytest.approx(0.1)


def test_only_the_second_half_counts_once_fleets_are_warm() -> None:
    seen = run("load", [replace(alone(10, 2), starts_at=at) for at in (0.0, 1.9, 2.0, 4.0)]).steady()
    assert [one.arrived_at for one in seen.asked] == [2.0, 4.0]
    assert seen.ended_at - seen.began_at == 2.0


def test_drawn_conversations_have_the_rate_and_the_lengths_of_their_shape() -> None:
    for name, shape in SHAPES.items():
        found = list(drawn(replace(shape, longest=10**9), rate=50.0, num_requests=6000, seed=1))
        turns = [turn for one in found for turn in one.turns]
        assert len(turns) / found[-1].starts_at == pytest.approx(50, rel=0.3), name
        assert np.median([turn.num_answer for turn in turns]) == pytest.approx(shape.answer[0], rel=0.1), name
        assert len(turns) / len(found) == pytest.approx(shape.turns, rel=0.1), name
        gaps = np.diff([one.starts_at for one in found])
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(shape.arrival_cv, rel=0.25), name
    assert max(one.num_tokens for one in drawn(SHAPES["agents"], rate=1.0, num_requests=2000, seed=2)) <= 32_768


def test_traces_are_read_with_what_their_prompts_share(tmp_path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 700, "output_length": 9, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 11, 12]},
    ]
    mooncake = tmp_path / "a.jsonl"
    mooncake.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = traced(mooncake, longest=1000, speed=2.0)
    assert (first.starts_at, second.starts_at) == (0.0, 1.0)
    prompts = [token_ids(one.turns[0].spans) for one in (first, second)]
    assert [len(prompt) for prompt in prompts] == [700, 996] and (prompts[0][:512] == prompts[1][:512]).all()
    assert (prompts[0][512:] != prompts[1][512:700]).any()
    azure = tmp_path / "b.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,30,5\n2023-11-16 18:17:04.4799600,40,6\n"
    )
    first, second = traced(azure, longest=1000)
    assert (
        second.starts_at == pytest.approx(0.5) and second.turns[0].num_tokens == 40 and second.turns[0].num_answer == 6
    )
    with pytest.raises(ValueError, match="jsonl"):
        next(traced(tmp_path / "c.txt", longest=1000))


def test_a_step_takes_what_its_busiest_rank_has() -> None:
    plan = StepPlan(
        0,
        Chunks(
            rows=np.array([0, 1, 4, 5]),
            starts=np.array([10, 30, 100, 0]),
            lengths=np.array([1, 1, 1, 20]),
            token_ids=np.zeros(23, np.int32),
            samples=np.array([True, True, True, True]),
        ),
    )
    assert load_of(plan, rows_per_rank=4) == StepLoad(rows=1, context=100, prompt=20, prompt_context=190, prompt_ends=1)
    assert load_of(StepPlan(0), rows_per_rank=4) == StepLoad()
    assert TIMES.seconds(StepLoad(1, 100, 20, 190, 1)) == pytest.approx(0.01 + 0.001 + 20 * 0.0002)


def test_measured_steps_are_read_as_they_were_written(tmp_path) -> None:
    TIMES.write(tmp_path / "times.json")
    assert MeasuredSteps.read(tmp_path / "times.json") == TIMES


def test_a_fit_finds_the_parts_of_times_and_none_below_nothing() -> None:
    found = fit([(1.0, rows, rows**2, 0.01 + 0.002 * rows) for rows in (1.0, 2.0, 4.0, 8.0)])
    assert found == pytest.approx([0.01, 0.002, 0.0], abs=1e-9)
    assert fit([(1.0, x, 0.02 - 0.001 * x) for x in (1.0, 2.0, 3.0)])[1] == 0.0


def test_steps_of_a_slice_take_longer_with_more_to_do() -> None:
    found = slice_replica("qwen3-30b-a3b", "v6e:2x4", num_data_ranks=4, page_size=128, longest=8192)
    idle, rows, long, prompt = map(
        found.steps.seconds, (StepLoad(1, 64), StepLoad(64, 64_000), StepLoad(64, 640_000), StepLoad(1, 64, 1024, 0, 1))
    )
    assert 0 < idle < rows < long and idle < prompt
    assert found.num_pages * 128 > 100_000
    with pytest.raises(ValueError, match="does not fit"):
        slice_replica("qwen3-235b-a22b", "v6e:2x4", num_data_ranks=4, page_size=128, longest=8192)


def test_results_are_merged_where_they_are_of_the_same_fleet() -> None:
    row = {"num_replicas": 1, "rate": 1.0, "policy": "load", "hits": 0.1}
    known = {"replica": "a", "rows": [row, {**row, "num_replicas": 4}]}
    new = {"replica": "a", "rows": [{**row, "hits": 0.2}, {**row, "policy": "prefix"}]}
    assert [(each["num_replicas"], each["policy"], each["hits"]) for each in merged(known, new)] == [
        (1, "load", 0.2),
        (1, "prefix", 0.1),
        (4, "load", 0.1),
    ]
    assert merged(known, {**new, "replica": "b"}) == new["rows"]
