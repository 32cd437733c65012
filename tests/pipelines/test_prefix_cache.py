"""What was cached is what would have been computed: same tokens, same log-probs, the very rows of the first run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.scheduling.scheduler import finish_session
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.random_hints import random_retention, random_session
from tests.support.engine.run_requests import Way, cycle_for, kept_tokens, preempt_every, run_on
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.models.core import PAGE_SIZE

TIGHT = 32
"""Pages for two long sequences."""


def whole_pages(num_tokens: int, kept: int = PAGE_SIZE) -> int:
    """Tokens that can be cached of a prompt, in multiples of `kept`: its last one is always computed."""
    return (num_tokens - 1) // kept * kept


def cached_of(request: GenerationRequest, kept: int = PAGE_SIZE) -> int:
    return whole_pages(len(request.prompt_ids), kept)


def may_share(request: GenerationRequest, choice: int, kept: int = PAGE_SIZE) -> set[int]:
    """Return the cached prompt tokens of a choice beyond the first: all if it forked, else the cacheable prefix."""
    return {len(request.prompt_ids), cached_of(request, kept)} if choice else {cached_of(request, kept)}


def salted(request: GenerationRequest, salt: str) -> GenerationRequest:
    return replace(request, cache_salt=salt)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [Way(), Way(overlaps=False), Way(chunk_tokens=7, num_rows=3)], ids=str)
def test_the_second_run_finds_the_prompts_of_the_first_and_comes_to_the_same(engine: Engine, alone: Outcomes, way: Way):
    cycle, kept = cycle_for(engine.runner, engine.card, way), kept_tokens(engine.runner)
    first, second = (run_on(cycle, engine.card, mixed_workload()) for _ in range(2))
    assert_all_same(first, alone)
    assert_all_same(second, alone)
    for request in mixed_workload():
        for choice in range(request.sampling.n):
            before, after = first[request.request_id, choice], second[request.request_id, choice]
            num_cached = after.num_cached
            assert before.num_cached in (may_share(request, choice, kept) if choice else {0})
            assert num_cached in may_share(request, choice, kept)
            assert after.routing is not None and before.rows.tobytes() == after.rows.tobytes()
            computed = (num_cached, len(after.rows), "computed")
            assert after.routing.source == (((0, num_cached, "cached"), computed) if num_cached else (computed,))


def test_a_conversation_finds_the_answers_it_got(engine: Engine):
    """Each turn's prompt is all that was said; nothing of it is computed twice but what fills no page."""
    generator = np.random.default_rng(3)
    cycle, uncached = (cycle_for(engine.runner, engine.card, Way(caches_prefixes=on)) for on in (True, False))
    kept = kept_tokens(engine.runner)
    said: list[int] = []
    for turn in range(4):
        num_before = len(said)
        said += draw_prompt(generator, 23).tolist()
        wanted = request_for(said, f"turn{turn}", max_new_tokens=18, temperature=1.0, seed=turn)
        found = run_on(cycle, engine.card, [wanted])
        assert found[f"turn{turn}", 0].num_cached == (whole_pages(num_before, kept) if turn else 0)
        said += found[f"turn{turn}", 0].ids
    expected = run_on(uncached, engine.card, [wanted])
    assert_all_same(found, expected)
    assert expected["turn3", 0].num_cached == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("intervene", [None, preempt_every(6)], ids=["", "preemption"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_pool_too_small_for_all_prefixes_keeps_some_and_serves_all(
    engine: Engine, alone: Outcomes, overlaps: bool, intervene
):
    kept = kept_tokens(engine.runner)
    # Only prompts of more than four pages are found if prefixes end at multiples of 64 tokens.
    num_pages = TIGHT if kept == PAGE_SIZE else 2 * TIGHT
    cycle = cycle_for(engine.runner, engine.card, Way(num_pages=num_pages, overlaps=overlaps))
    for _ in range(2):
        outcomes = run_on(cycle, engine.card, mixed_workload(), intervene=intervene)
        assert_all_same(outcomes, alone)
    found = sum(outcomes[request.request_id, 0].num_cached for request in mixed_workload())
    all_cached = sum(cached_of(request, kept) for request in mixed_workload())
    assert 0 < found < all_cached, "some of it had to make room"


def test_hints_change_what_stays_cached_and_nothing_else(engine: Engine, alone: Outcomes):
    """Sessions end and are edited, and protections compete for half of a pool that is too small for all."""
    generator = np.random.default_rng(5)
    num_pages = TIGHT if kept_tokens(engine.runner) == PAGE_SIZE else 2 * TIGHT
    cycle = cycle_for(engine.runner, engine.card, Way(num_pages=num_pages))
    for _ in range(3):
        hinted = [
            replace(request, session=random_session(generator), retention=random_retention(generator))
            for request in mixed_workload()
        ]
        assert_all_same(run_on(cycle, engine.card, hinted, intervene=preempt_every(7)), alone)
        finish_session(cycle.scheduler, "a")
        for rank in cycle.scheduler.ranks:
            rank.check_integrity()
    protected = sum(rank.tree.order.num_protected for rank in cycle.scheduler.ranks)
    assert 0 < protected <= len(cycle.scheduler.ranks) * num_pages // 2, "there was nothing to protect"


def test_requests_with_different_salts_share_nothing(engine: Engine, alone: Outcomes):
    cycle, requests = cycle_for(engine.runner, engine.card, Way()), mixed_workload()[:6]
    for salt, finds in (("", False), ("a", False), ("b", False), ("a", True), ("", True)):
        outcomes = run_on(cycle, engine.card, [salted(request, salt) for request in requests])
        assert_all_same(outcomes, {key: alone[key] for key in outcomes})
        for request in requests:
            assert outcomes[request.request_id, 0].num_cached == (cached_of(request) if finds else 0)


def test_without_prefix_caching_only_the_choices_of_a_request_share(engine: Engine, alone: Outcomes):
    cycle = cycle_for(engine.runner, engine.card, Way(caches_prefixes=False))
    for _ in range(2):
        outcomes = run_on(cycle, engine.card, mixed_workload())
        assert_all_same(outcomes, alone)
        for request in mixed_workload():
            first, *others = [outcomes[request.request_id, choice].num_cached for choice in range(request.sampling.n)]
            assert first == 0 and set(others) <= may_share(request, 1)
        assert cycle.scheduler.ranks[0].tree.num_cached_pages == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("flushed_at", [1, 2, 6, 20])
def test_a_flush_forgets_what_was_computed_before_it_and_disturbs_nobody(
    engine: Engine, alone: Outcomes, flushed_at: int
):
    cycle = cycle_for(engine.runner, engine.card, Way(chunk_tokens=64))
    running: set[str] = set()

    def flush(cycle: StepCycle, step: int) -> None:
        if step == flushed_at:
            cycle.scheduler.flush()
            assert cycle.scheduler.ranks[0].tree.num_cached_pages == 0
            running.update(s.request.request_id for s in cycle.scheduler.running)

    assert_all_same(run_on(cycle, engine.card, mixed_workload(), intervene=flush), alone)
    again = run_on(cycle, engine.card, mixed_workload())
    assert_all_same(again, alone)
    for request in mixed_workload():
        if request.request_id in running and request.sampling.n == 1:
            assert again[request.request_id, 0].num_cached == 0, "it was computed before, at least in part"


def test_whoever_was_preempted_goes_on_from_its_pages(engine: Engine, alone: Outcomes):
    """Tokens of a preempted sequence are recomputed only in a page that is not full, or after its last entry."""
    cycle = cycle_for(engine.runner, engine.card, Way())
    requests = [request for request in mixed_workload() if request.sampling.n == 1]
    outcomes = run_on(cycle, engine.card, requests, intervene=preempt_every(5))
    assert_all_same(outcomes, {key: alone[key] for key in outcomes})
    assert cycle.scheduler.num_preemptions >= 4
    num_needed = sum(len(outcome.rows) for outcome in outcomes.values())
    num_again = cycle.statistics()["tokens_computed"] - num_needed
    assert 0 < num_again <= cycle.scheduler.num_preemptions * (kept_tokens(engine.runner) + 1)
    for outcome in outcomes.values():
        assert outcome.routing is not None
        assert "cached" not in {kind for _, _, kind in outcome.routing.source}, "these rows are its own"
