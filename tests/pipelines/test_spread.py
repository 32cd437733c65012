"""How a model is spread over data and tensor ranks does not show in what the engine answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.scheduling.sequence import Sequence
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, new_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import choices_of, cycle_for, run_alone, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.experts.moe_layer import shuffled
from tests.support.experts.placements import SIZES, Spread
from tests.support.models.core import CORE_CONFIG, PAGE_SIZE

CONFIG = replace(CORE_CONFIG, num_attention_heads=8)
"""Heads for eight tensor ranks; two KV heads, which most of them share."""

NUM_REDUNDANT = 8
"""A step holds one block of a prompt: so there is one shape with prompts to compile, and one without."""


@dataclass(frozen=True)
class Spreads:
    """Compiled runners by their spread, and what they all serve."""

    runner: Callable[[Spread], HostRunner]
    card: ModelCard
    expected: Outcomes

    def run(self, spread: Spread, requests: Iterable[GenerationRequest]) -> Outcomes:
        return run_together(self.runner(spread), self.card, requests, way=WAY)


def spread_over(path: Path, spread: Spread, **settings: Any) -> HostRunner:
    """Return a runner over the devices of a spread, with its placement of experts and further settings."""
    made = new_runner(
        path,
        mesh=(spread.data, spread.tensor),
        expert_backend=spread.backend,
        num_redundant_experts=spread.num_redundant,
        enable_return_routed_experts=True,
        **TWO_SHAPES,
        **settings,
    )
    if spread.shuffled:
        made.served = replace(made.served, placement=shuffled(made.placement, seed=spread.data))
    made.prepare(made.load())
    return made


@pytest.fixture(scope="module")
def spreads(tmp_path_factory: pytest.TempPathFactory) -> Spreads:
    """Spreads of one checkpoint; expected is the mixed workload on one device, each request alone."""
    path = write_checkpoint(tmp_path_factory.mktemp("eight_heads") / "model", CONFIG, seed=3, dtype="float32")

    # Each compiled program takes hundreds of memory maps, of which a process has 65,530: forget those of the matrix.
    @lru_cache(maxsize=2 * len(SAMPLE))
    def runner(spread: Spread) -> HostRunner:
        return spread_over(path, spread)

    card = card_of(path)
    alone = run_alone(runner(Spread(1, 1)), card, mixed_workload(), way=WAY)
    return Spreads(runner, card, alone)


MATRIX = [
    Spread(*sizes, backend, num_redundant, is_shuffled)
    for sizes, backend, num_redundant, is_shuffled in itertools.product(
        SIZES, ("replicated", "all_to_all", "fused"), (0, NUM_REDUNDANT), (False, True)
    )
]
SAMPLE = [
    Spread(2, 1, "all_to_all"),
    Spread(2, 2, "all_to_all", NUM_REDUNDANT, shuffled=True),
    Spread(1, 8, "fused", shuffled=True),
]
"""Both axes alone and together, every backend, every kind of placement; compiling one takes most of its time."""

TWO_BY_TWO = SAMPLE[1]


@pytest.mark.slow
@pytest.mark.parametrize("spread", dict.fromkeys(SAMPLE + MATRIX), ids=str)
def test_the_spread_does_not_show(spreads: Spreads, spread: Spread):
    assert_all_same(spreads.run(spread, mixed_workload()), spreads.expected)


@pytest.fixture(scope="module")
def two_by_two(core_checkpoint: Path) -> HostRunner:
    """The core model, which has heads enough for these devices."""
    return spread_over(core_checkpoint, TWO_BY_TWO)


@pytest.mark.float32("devices add up parts of sums")
def test_both_axes_do_not_show(two_by_two: HostRunner, engine: Engine, alone: Outcomes):
    assert_all_same(run_together(two_by_two, engine.card, mixed_workload(), way=WAY), alone)


@pytest.mark.float32("devices add up parts of sums")
def test_a_rank_without_work_does_not_show(two_by_two: HostRunner, engine: Engine, alone: Outcomes):
    request = mixed_workload()[0]
    found = run_together(two_by_two, engine.card, [request], way=WAY)
    assert_all_same(found, {key: outcome for key, outcome in alone.items() if key[0] == request.request_id})


@pytest.mark.natively
def test_requests_of_two_data_ranks_never_share_a_routing_row(two_ranks: Engine):
    """Nearly as many requests as rows, on ranks whose rows and pages have the same numbers."""
    generator = np.random.default_rng(27)
    lengths = generator.integers(3, 60, 27)
    requests = [request_for(draw_prompt(generator, n), f"q{i}", max_new_tokens=9) for i, n in enumerate(lengths)]
    alone = run_alone(two_ranks.runner, two_ranks.card, requests, way=ON_TWO_RANKS)
    ranks: dict[str, int] = {}

    def note_ranks(cycle: StepCycle, step: int) -> None:
        ranks.update((sequence.request.request_id, sequence.data_rank) for sequence in cycle.scheduler.running)

    way = replace(ON_TWO_RANKS, intervene=note_ranks)
    together = run_together(two_ranks.runner, two_ranks.card, requests, way=way)
    assert np.bincount(list(ranks.values()), minlength=2).min() >= 10
    assert_all_same(together, alone)
    for (request_id, _), outcome in together.items():
        assert len(outcome.rows) == lengths[int(request_id[1:])] + 9 - 1


@pytest.mark.natively
def test_preemption_on_ranks_with_few_pages_does_not_show(two_ranks: Engine, alone: Outcomes):
    preempted: set[int] = set()

    def note_preempted(cycle: StepCycle, step: int) -> None:
        if cycle.scheduler.num_preemptions:
            preempted.update(s.data_rank for s in cycle.scheduler.waiting if s.queue.num_to_recompute)

    way = replace(ON_TWO_RANKS, num_pages=16, intervene=note_preempted)
    for requests in (mixed_workload(), mixed_workload()[::-1]):
        assert_all_same(run_together(two_ranks.runner, two_ranks.card, requests, way=way), alone)
    assert preempted == {0, 1}


def finish(
    cycle: StepCycle, requests: list[GenerationRequest], card: ModelCard, *, turns_between: int = 0
) -> list[Sequence]:
    """Run requests of one choice to their end, so many turns after each other; what they leave cached stays."""
    sequences = [sequence for request in requests for sequence in choices_of(request, card)]
    for sequence in sequences:
        cycle.scheduler.add([sequence])
        for _ in range(turns_between):
            cycle.run()
    while cycle.has_work:
        cycle.run()
        cycle.scheduler.check_integrity()
    return sequences


@pytest.mark.natively
def test_requests_with_nothing_cached_are_spread_over_the_ranks(two_ranks: Engine):
    generator = np.random.default_rng(5)
    requests = [request_for(draw_prompt(generator, 20), f"n{i}", max_new_tokens=4) for i in range(6)]
    cycle = cycle_for(two_ranks.runner, two_ranks.card, ON_TWO_RANKS)
    ranks = [sequence.data_rank for sequence in finish(cycle, requests, two_ranks.card)]
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]


@pytest.mark.natively
def test_a_prompt_goes_where_it_is_cached(two_ranks: Engine):
    """Also a prompt that only begins alike, and while the other rank has nothing to do."""
    generator = np.random.default_rng(6)
    prompts = [draw_prompt(generator, 5 * PAGE_SIZE) for _ in range(2)]
    cycle = cycle_for(two_ranks.runner, two_ranks.card, ON_TWO_RANKS)
    first = finish(cycle, [request_for(p, f"a{i}", max_new_tokens=12) for i, p in enumerate(prompts)], two_ranks.card)
    assert {sequence.data_rank for sequence in first} == {0, 1}
    assert [sequence.cache.num_cached for sequence in first] == [0, 0]
    for prompt, before in zip(prompts, first, strict=True):
        longer = [np.concatenate([prompt, draw_prompt(generator, 7)]) for _ in range(3)]
        again = [request_for(ids, f"b{i}", max_new_tokens=12) for i, ids in enumerate([prompt, *longer])]
        found = finish(cycle, again, two_ranks.card, turns_between=2)
        assert {sequence.data_rank for sequence in found} == {before.data_rank}
        assert [sequence.cache.num_cached for sequence in found] == [4 * PAGE_SIZE, *[5 * PAGE_SIZE] * 3]
        np.testing.assert_array_equal(found[0].token_ids[: before.num_tokens], before.token_ids[: before.num_tokens])
