"""A request that another replica goes on with, after its own was lost: states of recurrent layers are the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.state.entries import NO_ENTRY, EntryState
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcome, assert_identical
from tests.support.engine.run_requests import cycle_for, run_on
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import NUM_PAGES, PAGE_SIZE
from tests.support.models.families import family_case, write_family

GRID = 64
"""Tokens from one entry to the next."""
LENGTHS = ((5, 70), (60, 75), (64, 70), (100, 100), (129, 70))
"""Tokens of prompts and answers; every answer passes a multiple of 64."""
CUTS = (1, 5, 30, 64, 69)
"""Generated tokens that the lost replica has committed."""
OTHERS = ("qwen3_next-1", "kimi_linear-0", "bailing_hybrid-0", "nemotron_h-0", "granitemoehybrid-0")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
Replicas = tuple[HostRunner, HostRunner]


@pytest.fixture(scope="module", params=["qwen3_5_moe_text-0", *SLOW])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    case = family_case(request.param)
    return write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype="bfloat16")


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint)


@pytest.fixture(scope="module")
def replicas(checkpoint: Path) -> Replicas:
    """Two runners, each with pools of its own."""
    native = {"dtype": "bfloat16", "cpu_kernels": "native", "enable_return_routed_experts": True}
    return prepared_runner(checkpoint, **TWO_SHAPES, **native), prepared_runner(checkpoint, **TWO_SHAPES, **native)


def requests_of() -> list[GenerationRequest]:
    """Return requests of which every second one is greedy."""
    generator = np.random.default_rng(4)
    return [
        request_for(draw_prompt(generator, length), f"{i}", max_new_tokens=num_new, temperature=float(i % 2), seed=i)
        for i, (length, num_new) in enumerate(LENGTHS)
    ]


def committed_of(request: GenerationRequest, outcome: Outcome, count: int) -> ChoiceResult:
    """What a journal has of a request after `count` generated tokens."""
    ids, logprobs = outcome.ids[:count], outcome.logprobs[:count]
    return ChoiceResult(request.request_id, token_ids=ids, logprobs=logprobs, ranks=[1] * count)


def cached_states(cycle: StepCycle, runner: HostRunner, ids: Iterable[int]) -> dict[int, np.ndarray]:
    """Return the cached states of a sequence by their tokens, as bits: uint32 [layers, heads, key width, value width].

    Inputs of the convolution ahead of a state follow it.
    """
    rank = cycle.scheduler.ranks[0]
    (entries,) = rank.states
    assert isinstance(entries, EntryState)
    pages = rank.tree.matching_pages(("",), np.asarray([*ids], np.int32))
    (group,) = runner.served.pool.entry_groups(NUM_PAGES)
    state, window = (
        np.asarray(pool).reshape(-1, group.num_entries, *pool.shape[1:]).view(np.uint32)
        for pool in runner.state.pools["delta"][:2]
    )
    return {
        (place + 1) * PAGE_SIZE: np.concatenate([part[:, entry].reshape(len(part), -1) for part in (state, window)], 1)
        for place, entry in enumerate(entries.place_of[pages].tolist())
        if entry != NO_ENTRY
    }


@pytest.mark.parametrize("num_committed", CUTS)
def test_a_request_goes_on_elsewhere_with_the_states_that_it_had(
    replicas: Replicas, card: ModelCard, num_committed: int
):
    """By native kernels no bit differs: of ids, log-probs, rows, states, and inputs of the convolution."""
    requests, (first, second) = requests_of(), replicas
    before, after = cycle_for(first, card, WAY), cycle_for(second, card, WAY)
    undisturbed = run_on(before, card, requests)
    committed = [committed_of(each, undisturbed[each.request_id, 0], num_committed) for each in requests]
    resumed = run_on(after, card, requests, committed=committed)
    assert_identical(resumed, undisturbed)
    for request in requests:
        ids = [*request.prompt_ids.tolist(), *undisturbed[request.request_id, 0].ids][:-1]
        expected, found = cached_states(before, first, ids), cached_states(after, second, ids)
        both = expected.keys() & found.keys()
        assert len(ids) // GRID * GRID in both, "the last state stays"
        for place in both:
            bits = expected[place]
            assert np.count_nonzero(bits.view(np.float32)) > bits.size // 2
            assert np.count_nonzero(bits != found[place]) == 0
    for cycle in (before, after):
        cycle.scheduler.flush()
