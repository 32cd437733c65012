"""The same tokens have the same routing, byte for byte, in whatever way they came to be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts
from rayserve_moe.requests.results import ChoiceResult
from tests.pipelines.conftest import ReferenceFactory
from tests.support.engine.outputs import Outcome, Outcomes
from tests.support.engine.run_requests import (
    Way,
    cycle_for,
    kept_tokens,
    preempt_every,
    run_alone,
    run_on,
    run_together,
)
from tests.support.engine.workload import draw_prompt, engine_arguments, mixed_workload, request_for
from tests.support.models.core import PAGE_SIZE
from tests.support.routing.router_reference import RouterReference, Tally

PROMPT = draw_prompt(np.random.default_rng(31), 75)
SAMPLED = request_for(PROMPT, temperature=1.0, seed=5, max_new_tokens=40)

Run = Callable[[Engine, list[GenerationRequest]], Outcomes]


def together(**way: object) -> Run:
    return lambda engine, requests: run_together(engine.runner, engine.card, requests, way=Way(**way))


def found_cached(**way: object) -> Run:
    """Run twice on one cycle; the second time all prompts that are long enough are found, from where they lie."""

    def run(engine: Engine, requests: list[GenerationRequest]) -> Outcomes:
        cycle = cycle_for(engine.runner, engine.card, Way(**way))
        run_on(cycle, engine.card, requests)
        again = run_on(cycle, engine.card, requests)
        cycle.scheduler.flush()
        for request in requests:
            if len(request.prompt_ids) > kept_tokens(engine.runner):
                assert again[request.request_id, 0].num_cached > 0
        return again

    return run


WAYS: dict[str, Run] = {
    "batched": together(),
    "chunks of a page": together(chunk_tokens=16),
    "ragged chunks": together(chunk_tokens=7, num_rows=3),
    "without overlap": together(overlaps=False),
    "prefix hit": found_cached(),
    "prefix miss": together(caches_prefixes=False),
    "preempted, pages found again": together(intervene=preempt_every(5)),
    "preempted, pages lost": together(intervene=preempt_every(5, forgets=True)),
    "few pages": together(num_pages=29, num_rows=6),
}


@pytest.fixture(scope="module")
def reference(core_checkpoint: Path, reference_for: ReferenceFactory) -> RouterReference:
    return reference_for(core_checkpoint)


@pytest.fixture(scope="module")
def uncached(engine: Engine) -> Outcomes:
    """The mixed workload and one more, each request alone, whole, with nothing cached."""
    return run_alone(engine.runner, engine.card, workload(), way=Way(caches_prefixes=False))


def workload() -> list[GenerationRequest]:
    four = request_for(PROMPT, "four", n=4, temperature=1.0, seed=9, max_new_tokens=14)
    return [*mixed_workload(), four]


def tokens_of(request: GenerationRequest, outcome: Outcome) -> list[int]:
    return [*request.prompt_ids.tolist(), *outcome.ids]


def routing_of(outcome: Outcome) -> RoutedExperts:
    assert outcome.routing is not None
    assert outcome.routing.missing == () and outcome.routing.start == 0
    return outcome.routing


def fed_again(engine: Engine, token_ids: list[int]) -> RoutedExperts:
    """Routing of the very tokens in an isolated run without anything cached, generating nothing."""
    scored = request_for(token_ids, "again", max_new_tokens=0)
    outcomes = run_alone(engine.runner, engine.card, [scored], way=Way(caches_prefixes=False))
    return routing_of(outcomes["again", 0])


def test_an_isolated_run_chooses_what_plain_numpy_chooses(uncached: Outcomes, reference: RouterReference):
    tally = Tally()
    for request in workload():
        for choice in range(request.sampling.n):
            outcome = uncached[request.request_id, choice]
            reference.check(tokens_of(request, outcome), routing_of(outcome), tally)
    tally.check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WAYS)
def test_the_way_does_not_show(name: str, engine: Engine, uncached: Outcomes):
    assert_same_routing(WAYS[name](engine, workload()), uncached)


STEP = {"step_tokens": 64, "chunk_tokens": 64}
WAYS_ON_TWO_RANKS: dict[str, Run] = {
    "batched": together(**STEP),
    "prefix hit": found_cached(**STEP),
    "preempted, pages lost": together(**STEP, intervene=preempt_every(5, forgets=True)),
}


@pytest.mark.natively
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WAYS_ON_TWO_RANKS)
def test_two_data_ranks_do_not_show(name: str, two_ranks: Engine, uncached: Outcomes):
    assert_same_routing(WAYS_ON_TWO_RANKS[name](two_ranks, workload()), uncached)


def assert_same_routing(found: Outcomes, wanted: Outcomes) -> None:
    """Assert that every choice is there, with the same tokens and rows."""
    assert found.keys() == wanted.keys()
    for key, outcome in found.items():
        assert outcome.ids == wanted[key].ids
        assert routing_of(outcome).rows.tobytes() == routing_of(wanted[key]).rows.tobytes()


def test_each_of_four_choices_has_the_rows_of_its_own_tokens(engine: Engine):
    request = workload()[-1]
    found = run_together(engine.runner, engine.card, workload())
    for choice in range(4):
        outcome = found[request.request_id, choice]
        again = fed_again(engine, tokens_of(request, outcome))
        assert again.rows[:-1].tobytes() == routing_of(outcome).rows.tobytes()


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_adds_up_to_the_answer_at_once(engine: Engine, streams: bool):
    wanted = [
        replace(request, request_id=f"{request.request_id}-{streams}", stream_routed_experts=streams)
        for request in workload()
    ]
    engine.loop.flush()
    streams_of = [GenerationStream(engine.loop, engine.tokenizer, request=request) for request in wanted]
    read = [read_stream(request, stream) for request, stream in zip(wanted, streams_of, strict=True)]
    for request, choices in zip(wanted, read, strict=True):
        for result, pieces in choices:
            check_pieces(request, result, pieces, engine)
    num_pieces = max(len(pieces) for choices in read for _, pieces in choices)
    assert (num_pieces > 1) == streams


def read_stream(request: GenerationRequest, stream: GenerationStream) -> list[tuple[ChoiceResult, list[RoutedExperts]]]:
    """What each choice came to, and its pieces of routing."""
    choices = [(ChoiceResult(), []) for _ in range(request.sampling.n)]
    for delta in stream:
        result, pieces = choices[delta.choice_index]
        result.add(delta)
        if delta.routing is not None:
            pieces.append(delta.routing)
    return choices


def check_pieces(request: GenerationRequest, result: ChoiceResult, pieces: list[RoutedExperts], engine: Engine) -> None:
    """Pieces go on from one another, and together they are the rows of the tokens."""
    if not request.stream_routed_experts:
        assert len(pieces) == 1
    ends = [piece.start + len(piece.rows) for piece in pieces]
    assert [piece.start for piece in pieces] == [0, *ends[:-1]]
    token_ids = [*request.prompt_ids.tolist(), *result.token_ids]
    again = fed_again(engine, token_ids).rows
    joined = np.concatenate([piece.rows for piece in pieces])
    assert joined.tobytes() == again[: len(token_ids) - bool(result.token_ids)].tobytes()
    assert result.routing is not None and result.routing.rows.tobytes() == joined.tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("turn_tokens", [1, 17, 40])
def test_turns_spliced_by_start_are_one_whole_answer(engine: Engine, turn_tokens: int):
    """The last token of a turn is fed in the next one: so each begins at the row that the one before could not have."""
    generator = np.random.default_rng(turn_tokens)
    layout = engine.card.routing
    engine.loop.flush()
    token_ids: list[int] = []
    pieces = []
    for _ in range(5):
        start = max(0, len(token_ids) - 1)
        token_ids += draw_prompt(generator, turn_tokens).tolist()
        arguments = engine_arguments(request_for(token_ids, temperature=1.0, seed=3, max_new_tokens=9))
        answer = engine.generate(**arguments, routed_experts_start_len=start)
        assert answer["meta_info"]["routed_experts_start_len"] == start
        assert answer["meta_info"]["routed_experts_info"]["start"] == start
        token_ids += answer["output_ids"]
        flat = extract_routed_experts_from_meta_info(answer)
        pieces.append(flat.reshape(-1, layout.num_hidden_layers, layout.top_k)[:, list(layout.layer_ids)])
        assert len(pieces[-1]) == len(token_ids) - 1 - start
    engine.loop.flush()
    assert np.concatenate(pieces).astype(layout.dtype).tobytes() == fed_again(engine, token_ids).rows[:-1].tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("aborted_at", [1, 3, 11, 30])
@pytest.mark.parametrize("flushes", [True, False])
def test_aborted_and_continued_is_as_if_never_aborted(engine: Engine, aborted_at: int, flushes: bool):
    """The prompt and what was generated so far become the prompt of the rest."""
    greedy = request_for(PROMPT, max_new_tokens=30 + PAGE_SIZE)
    whole = run_alone(engine.runner, engine.card, [greedy], way=Way(caches_prefixes=False))["r", 0]
    cycle = cycle_for(engine.runner, engine.card, Way(chunk_tokens=32))

    def abort(cycle: StepCycle, step: int):
        return [cycle.end(cycle.scheduler.running[0], FinishReason("abort"))] if step == aborted_at else None

    begun = run_on(cycle, engine.card, [greedy], intervene=abort)["r", 0]
    assert begun.finish == FinishReason("abort") and begun.routing is not None
    if flushes:
        cycle.scheduler.flush()
    token_ids = tokens_of(greedy, begun)
    assert begun.ids == whole.ids[: len(begun.ids)]
    rest = request_for(token_ids, "rest", max_new_tokens=len(whole.ids) - len(begun.ids))
    ended = run_on(cycle, engine.card, [rest])["rest", 0]
    cycle.scheduler.flush()
    assert begun.ids + ended.ids == whole.ids
    assert routing_of(ended).rows.tobytes() == routing_of(whole).rows.tobytes()
    num_known = begun.routing.missing[0][0] if begun.routing.missing else len(begun.routing.rows)
    assert begun.routing.rows[:num_known].tobytes() == whole.rows[:num_known].tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way",
    [Way(), Way(chunk_tokens=7), Way(intervene=preempt_every(2, forgets=True))],
    ids=["whole", "chunks", "preemption"],
)
def test_replaying_what_was_captured_changes_nothing(engine: Engine, way: Way):
    first = run_alone(engine.runner, engine.card, [SAMPLED])["r", 0]
    prompt_rows = RoutedExperts(routing_of(first).rows[: len(PROMPT)])
    replayed = run_together(engine.runner, engine.card, [replace(SAMPLED, forced_routing=prompt_rows)], way=way)["r", 0]
    assert replayed.ids == first.ids
    np.testing.assert_allclose(replayed.logprobs, first.logprobs, rtol=0, atol=first.tolerance)
    assert routing_of(replayed).rows.tobytes() == routing_of(first).rows.tobytes()


def test_replaying_a_whole_answer_in_a_scoring_request_changes_nothing(engine: Engine):
    first = run_alone(engine.runner, engine.card, [SAMPLED])["r", 0]
    scored = replace(
        request_for(tokens_of(SAMPLED, first), "again", max_new_tokens=0), forced_routing=routing_of(first)
    )
    again = run_alone(engine.runner, engine.card, [scored])["again", 0]
    assert routing_of(again).rows[:-1].tobytes() == routing_of(first).rows.tobytes()


def test_replaying_other_experts_shows_them_and_changes_what_follows(engine: Engine):
    first = run_alone(engine.runner, engine.card, [SAMPLED])["r", 0]
    layout = engine.card.routing
    others = RoutedExperts(((routing_of(first).rows[: len(PROMPT)].astype(int) + 1) % layout.num_experts).astype("u1"))
    forced = run_alone(engine.runner, engine.card, [replace(SAMPLED, forced_routing=others)])["r", 0]
    assert routing_of(forced).rows[: len(PROMPT)].tobytes() == others.rows.tobytes()
    assert np.abs(np.subtract(forced.logprobs, first.logprobs)).max() > 1e-3
    plain = run_together(engine.runner, engine.card, [SAMPLED])["r", 0]
    assert routing_of(plain).rows.tobytes() == routing_of(first).rows.tobytes()
