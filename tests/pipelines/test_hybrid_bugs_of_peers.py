"""Open bugs of other servers with hybrid models, each as a law of ours.

Hybrid models keep a recurrent state, which these servers hold in slots, blocks of hundreds of tokens, or leaves of a
radix cache. Numbers are issues and pull requests of their repositories. Every run is held to each request alone with
nothing cached: the same ids and routing rows, log-probs within `RECURRENT_TOLERANCE`. `make test` runs the laws over
the native kernels, `make test-all` over those of XLA too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.state.entries import NO_ENTRY, EntryState
from tests.support.engine.host_runners import card_of, new_runner, prepared_runner, shared_by_many
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import (
    Way,
    cycle_for,
    preempt_every,
    run_alone,
    run_on,
    run_together,
    speculation_of,
)
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import CORE_CONFIG, NUM_PAGES, PAGE_SIZE
from tests.support.models.families import family_case, write_family
from tests.support.models.full_logits import prompt_outputs_of
from tests.support.speculation.oracle_proposer import Oracle

GRID = 64
"""Tokens from one entry to the next."""
ROWS, STEP_TOKENS, DRAFTS = 4, 128, 3
SIZES: dict[str, Any] = {
    "max_running_requests": ROWS,
    "max_step_tokens": STEP_TOKENS,
    "precompile_bs_paddings": [ROWS * (1 + DRAFTS)],
    "page_size": PAGE_SIZE,
    "num_pages": NUM_PAGES,
    "enable_return_routed_experts": True,
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": DRAFTS,
    "structured_output": False,
}
WAY = Way(num_rows=ROWS, step_tokens=STEP_TOKENS, chunk_tokens=STEP_TOKENS)
ALONE = replace(WAY, caches_prefixes=False)
AROUND_THE_GRID = (1, 62, 63, 64, 65, 100, 127, 128, 129, 192, 200)
ABORTED = FinishReason("abort")
NATIVE = {"dtype": "bfloat16", "cpu_kernels": "native"}
QUICK, BY_XLA = "qwen3_5_moe_text-0 native", ("qwen3_5_moe_text-0", "qwen3_next-1")
"""Programs of the native kernels compile in a third of the time."""


@pytest.fixture(scope="module", params=[QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in BY_XLA)])
def case(request: pytest.FixtureRequest) -> str:
    """A family by one of the tables of kernels."""
    return request.param


@pytest.fixture(scope="module")
def kernels(case: str) -> dict[str, str]:
    """Settings of the table."""
    return NATIVE if case == QUICK else {"cpu_kernels": "off"}


@pytest.fixture(scope="module")
def checkpoint(case: str, kernels: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if kernels is NATIVE:
        need_native_kernels()
    family = family_case(case.partition(" ")[0])
    directory = tmp_path_factory.mktemp(family.name) / "model"
    return write_family(family, directory, seed=5, dtype=kernels.get("dtype", "float32"))


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint)


@pytest.fixture(scope="module")
def runner(checkpoint: Path, kernels: dict[str, str]) -> HostRunner:
    with shared_by_many():
        return prepared_runner(checkpoint, **SIZES, **kernels)


def prompts_of(*lengths: int, seed: int = 0, num_new: int = 20) -> list[GenerationRequest]:
    """Requests with prompts of these lengths, in turn greedy and drawn."""
    generator = np.random.default_rng(seed)
    return [
        request_for(
            draw_prompt(generator, length),
            f"{seed}: {length} tokens, {i}",
            max_new_tokens=num_new,
            temperature=float(i % 2),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]


def entries_of(cycle: StepCycle) -> EntryState:
    """Return the entries of the only data rank."""
    (state,) = cycle.scheduler.ranks[0].states
    assert isinstance(state, EntryState)
    return state


def next_turn(request: GenerationRequest, outcomes: Outcomes, *, turn: int) -> GenerationRequest:
    """Return a request that continues the conversation of another one."""
    said = [*request.prompt_ids.tolist(), *outcomes[request.request_id, 0].ids, *range(3, 12)]
    return replace(request, request_id=f"turn {turn} of {request.request_id}", prompt_ids=np.asarray(said, np.int32))


def test_cached_prefixes_do_not_show(runner: HostRunner, card: ModelCard):
    """tpu-inference#3412, #3358: 0.01 instead of 0.97 of GSM8K with cached prefixes. vllm#45699: the same, less far."""
    requests = prompts_of(*AROUND_THE_GRID)
    expected = run_alone(runner, card, requests, way=ALONE)
    cycle = cycle_for(runner, card, WAY)
    for is_cached in (False, True):
        found = run_on(cycle, card, requests)
        assert_all_same(found, expected)
        for request in requests:
            num_cached = (len(request.prompt_ids) - 1) // GRID * GRID if is_cached else 0
            assert found[request.request_id, 0].num_cached == num_cached
    cycle.scheduler.flush()


@pytest.mark.slow
def test_cached_prefixes_and_drafts_together_do_not_show(runner: HostRunner, card: ModelCard):
    """vllm#53912 (after #43559, #47861), #50172: tokens are lost and repeated with drafts and cached prefixes.

    Each turn of a conversation begins where the drafts of the turn before were accepted in part, and passes a
    multiple of 64 while it decodes.
    """
    turns, expected = [prompts_of(50, 60, 61, 63, 64, 90, 120, num_new=30)], []
    for turn in range(3):
        expected.append(run_alone(runner, card, turns[turn], way=ALONE))
        turns.append([next_turn(request, expected[turn], turn=turn + 1) for request in turns[turn]])
    known = {key: outcome for outcomes in expected for key, outcome in outcomes.items()}
    for share in (0.6, 1.0):
        oracle = Oracle(known, share=share, vocab_size=CORE_CONFIG.vocab_size)
        cycle = cycle_for(runner, card, replace(WAY, proposer=oracle, num_drafts=DRAFTS))
        for turn in range(3):
            found = run_on(cycle, card, turns[turn])
            assert_all_same(found, expected[turn])
            assert not turn or all(outcome.num_cached >= GRID for outcome in found.values())
        totals = speculation_of(cycle).totals
        assert totals.drafted > 0 and (totals.accepted == totals.drafted) == (share == 1.0)
        cycle.scheduler.flush()


@pytest.mark.parametrize("num_shared", [100, GRID, 2 * GRID + 5])
def test_a_shared_beginning_is_found_whatever_follows_it(runner: HostRunner, card: ModelCard, num_shared: int):
    """vllm#45238, #51250: no hit at all if the kept state lies behind the shared tokens. #36010: nothing is saved.

    The entry at the end of the shared tokens is kept by the second request, and the third one starts there.
    """
    beginning, generator = draw_prompt(np.random.default_rng(1), num_shared), np.random.default_rng(2)
    requests = [
        request_for([*beginning, *draw_prompt(generator, 70)], f"{i} after {num_shared}", max_new_tokens=5)
        for i in range(4)
    ]
    expected = run_alone(runner, card, requests, way=ALONE)
    cycle, found, computed = cycle_for(runner, card, WAY), {}, [0.0]
    for request in requests:
        found |= run_on(cycle, card, [request])
        computed.append(cycle.statistics()["tokens_computed"])
    assert_all_same(found, expected)
    first, _, *others = np.diff(computed)
    assert others == [first - num_shared // GRID * GRID] * 2
    cycle.scheduler.flush()


def test_a_prompt_that_ends_on_the_grid_starts_an_entry_earlier(runner: HostRunner, card: ModelCard):
    """vllm#51094: a hit of all but the last token restored the state after the last one, at an exact boundary."""
    requests = prompts_of(GRID, 2 * GRID, 3 * GRID, seed=3)
    expected = run_alone(runner, card, requests, way=ALONE)
    longer = [next_turn(request, expected, turn=1) for request in requests]
    cycle = cycle_for(runner, card, WAY)
    run_on(cycle, card, longer)
    for num_cached in ([0, 0, 0], [0, GRID, 2 * GRID]):
        entries = entries_of(cycle)
        pages = [cached_pages(cycle, request.prompt_ids) for request in requests]
        assert [entries.place_of[ids[-1]] != NO_ENTRY for ids in pages] == [True] * 3, "one stands at the prompt's end"
        found = run_on(cycle, card, requests)
        assert_all_same(found, expected)
        assert [outcome.num_cached for outcome in found.values()] == num_cached
    cycle.scheduler.flush()


def cached_pages(cycle: StepCycle, token_ids: np.ndarray) -> np.ndarray:
    """Return the pages of a cached prefix of requests without a salt."""
    return cycle.scheduler.ranks[0].tree.matching_pages(("",), token_ids)


@pytest.mark.slow
def test_each_prompt_of_a_step_leaves_the_entry_of_its_own_tokens(runner: HostRunner, card: ModelCard):
    """sglang#33450: states of a batch of prompts were taken at multiples in the batch, not in each prompt.

    Steps of 128 tokens hold parts of several prompts of 66 to 90 tokens, which begin anywhere.
    """
    requests = prompts_of(66, 79, 81, 90, 67, 70, 88, seed=4)
    expected = run_alone(runner, card, requests, way=ALONE)
    cycle = cycle_for(runner, card, WAY)
    run_on(cycle, card, requests)
    together = states_of_entries(cycle, runner, requests)
    found = run_on(cycle, card, requests)
    assert_all_same(found, expected)
    assert [outcome.num_cached for outcome in found.values()] == [GRID] * len(requests)
    cycle.scheduler.flush()
    for request, state in zip(requests, together, strict=True):
        cycle = cycle_for(runner, card, WAY)
        run_on(cycle, card, [request])
        (alone,) = states_of_entries(cycle, runner, [request])
        np.testing.assert_allclose(state, alone, rtol=1e-4, atol=1e-5)
        cycle.scheduler.flush()


def states_by_entry(runner: HostRunner) -> np.ndarray:
    """Return the states of all entries, float32 [layers, entries, heads, key width, value width]."""
    states = np.asarray(runner.state.pools["delta"][0])
    return states.reshape(-1, num_entries_of(runner), *states.shape[1:])


def num_entries_of(runner: HostRunner) -> int:
    """Return the number of entries of a layer."""
    return runner.served.pool.entry_groups(NUM_PAGES)[0].num_entries


def states_of_entries(cycle: StepCycle, runner: HostRunner, requests: Iterable[GenerationRequest]) -> list[np.ndarray]:
    """Return the states after the first 64 tokens of requests, as cached: float32 [layers, heads, key, value]."""
    entries, states, found = entries_of(cycle), states_by_entry(runner), []
    for request in requests:
        entry = entries.place_of[cached_pages(cycle, request.prompt_ids[:GRID])[-1]]
        assert entry != NO_ENTRY
        found.append(states[:, entry])
    return found


def test_short_prompts_leave_nothing_that_longer_ones_start_from(runner: HostRunner, card: ModelCard):
    """sglang#35821: a prompt without a state was an empty node of the tree, from which others copied a stale one."""
    long = prompts_of(130, seed=5)[0]
    short = [
        replace(long, request_id=f"first {count}", prompt_ids=long.prompt_ids[:count]) for count in (1, 15, 16, 40, 43)
    ]
    expected, cycle = run_alone(runner, card, [*short, long], way=ALONE), cycle_for(runner, card, WAY)
    found = run_on(cycle, card, short)
    assert not entries_of(cycle).place_of.any() and cycle.scheduler.ranks[0].tree.num_cached_pages > 0
    found |= run_on(cycle, card, [long])
    assert found[long.request_id, 0].num_cached == 0
    assert_all_same(found, expected)
    cycle.scheduler.flush()


def test_what_is_cached_are_states_of_tokens(runner: HostRunner, card: ModelCard):
    """vllm#53084: blocks of the null state were published as states of a prefix."""
    cycle = cycle_for(runner, card, WAY)
    run_on(cycle, card, prompts_of(*AROUND_THE_GRID, seed=6), intervene=preempt_every(7))
    entries = entries_of(cycle)
    kept = np.unique(entries.place_of)
    assert len(kept) > len(AROUND_THE_GRID) // 2
    states = states_by_entry(runner)
    is_zero = (states == 0).all(axis=(0, 2, 3, 4))
    assert np.isfinite(states[:, kept]).all()
    assert is_zero[NO_ENTRY] and not is_zero[kept[kept != NO_ENTRY]].any()
    without = np.flatnonzero(entries.place_of == NO_ENTRY)
    assert not entries.usable(entries.place_of[without] > 0)[1:].any()
    cycle.scheduler.flush()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [4, 128])
def test_pages_may_be_shorter_and_longer_than_the_grid(
    checkpoint: Path, kernels: dict[str, str], card: ModelCard, page_size: int
):
    """sglang#14560, #12007: states are cached with pages of one token only.

    With long pages, choices fork off a state that no page keeps.
    """
    num_pages = NUM_PAGES * PAGE_SIZE // page_size
    sizes = {**SIZES, "page_size": page_size, "num_pages": num_pages}
    own, way = prepared_runner(checkpoint, **sizes, **kernels), replace(WAY, page_size=page_size, num_pages=num_pages)
    several = request_for(draw_prompt(np.random.default_rng(7), 100), "several", n=4, max_new_tokens=40)
    requests = [*prompts_of(63, 64, 65, 129, 200, seed=7), several]
    expected = run_alone(own, card, requests[:-1], way=replace(way, caches_prefixes=False))
    single = replace(several, sampling=replace(several.sampling, n=1))
    (outcome,) = run_alone(own, card, [single], way=replace(way, caches_prefixes=False)).values()
    expected |= {("several", choice): outcome for choice in range(4)}
    cycle, kept_tokens = cycle_for(own, card, way), max(page_size, GRID)
    for is_cached in (False, True):
        found = run_on(cycle, card, requests)
        assert_all_same(found, expected)
        for request in requests:
            num_cached = (len(request.prompt_ids) - 1) // kept_tokens * kept_tokens if is_cached else 0
            assert found[request.request_id, 0].num_cached == num_cached
    cycle.scheduler.flush()


@pytest.mark.slow
def test_slots_that_others_leave_are_neither_lost_nor_read(runner: HostRunner, card: ModelCard):
    """tpu-inference#2779: slots leaked, and requests read states of the requests that had them before.

    Everything that the devices keep is NaN at the start. Requests are preempted, aborted while they run and while they
    wait, and their prefixes are flushed.
    """
    requests = prompts_of(*AROUND_THE_GRID, seed=8)
    doomed = {request.request_id for request in requests[::3]}
    expected = run_alone(runner, card, [one for one in requests if one.request_id not in doomed], way=ALONE)

    def intervene(cycle: StepCycle, step: int) -> list[Sequence]:
        preempt_every(5, forgets=step % 2 == 0)(cycle, step)
        gone = [one for one in cycle.scheduler.running if one.request.request_id in doomed and step % 4 == 0][:1]
        for sequence in gone:
            cycle.scheduler.end(sequence, ABORTED)
            cycle.scheduler.release(sequence)
        return gone

    fill_with_nan(runner)
    cycle = cycle_for(runner, card, replace(WAY, num_rows=3))
    found = run_on(cycle, card, requests, intervene=intervene)
    aborted = {key for key, outcome in found.items() if outcome.finish == ABORTED}
    assert {request_id for request_id, _ in aborted} <= doomed and len(aborted) >= 2
    assert cycle.scheduler.num_preemptions >= 5
    assert_all_same({key: found[key] for key in expected}, expected)
    cycle.scheduler.flush()
    cycle.scheduler.check_integrity()
    assert not entries_of(cycle).place_of.any()


def fill_with_nan(runner: HostRunner) -> None:
    """Fill all rings, and all entries except the entry of zeros, with NaN."""
    pools, num_entries = runner.state.pools["delta"], num_entries_of(runner)
    is_other = (jnp.arange(len(pools[0])) % num_entries != NO_ENTRY).reshape(-1, 1, 1, 1)
    new = [*(jnp.where(is_other, jnp.nan, part) for part in pools[:2]), *(part * jnp.nan for part in pools[2:])]
    poisoned = tuple(jax.device_put(part, old.sharding) for part, old in zip(new, pools, strict=True))
    runner._state = replace(runner.state, pools={**runner.state.pools, "delta": poisoned})


@pytest.mark.slow
def test_borders_of_chunks_do_not_show(runner: HostRunner, card: ModelCard):
    """vllm#43090, #39809, #57267: wrong or lost states. #34587: blocks were cached whose state a chunk had cut."""
    requests = prompts_of(5, 64, 65, 130, 200, seed=9)
    expected = run_alone(runner, card, requests, way=ALONE)
    for chunk_tokens in (1, 7, GRID, 100):
        found = run_together(runner, card, requests, way=replace(WAY, chunk_tokens=chunk_tokens))
        assert_all_same(found, expected)


@pytest.mark.slow
def test_choices_of_a_cached_prompt_do_not_change_the_state_that_they_share(runner: HostRunner, card: ModelCard):
    """vllm#56196: a chunk shorter than the convolution wrote to the block of the shared prefix.

    Choices begin at one entry, and later requests too, with 1 to 4 tokens of their own.
    """
    prompt = draw_prompt(np.random.default_rng(10), 100)
    several = request_for(prompt, "several", n=4, temperature=1.0, seed=3, max_new_tokens=40)
    greedy = request_for(prompt, "greedy", max_new_tokens=40)
    short = [request_for([*prompt[:GRID], *range(20, 21 + i)], f"short {i}", max_new_tokens=20) for i in range(4)]
    requests = [several, greedy, *short]
    singles = [
        request_for(prompt, "several", first_choice=choice, temperature=1.0, seed=3, max_new_tokens=40)
        for choice in range(4)
    ]
    expected = run_alone(runner, card, requests[1:], way=ALONE)
    for choice, single in enumerate(singles):
        (expected["several", choice],) = run_alone(runner, card, [single], way=ALONE).values()
    cycle = cycle_for(runner, card, WAY)
    for _ in range(3):
        assert_all_same(run_on(cycle, card, requests, intervene=preempt_every(9)), expected)
    cycle.scheduler.flush()


def test_rows_of_prompts_are_those_of_the_model(runner: HostRunner, card: ModelCard):
    """tpu-inference#3583: rows of prompts were zeros, for pages of the first layers, which are recurrent, were read."""
    requests = prompts_of(40, 100, 130, seed=11)
    outputs_of = prompt_outputs_of(runner, longest=160)
    cycle = cycle_for(runner, card, WAY)
    for is_cached in (False, True):
        found = run_on(cycle, card, requests, intervene=preempt_every(6))
        for request in requests:
            outcome = found[request.request_id, 0]
            fed = [*request.prompt_ids.tolist(), *outcome.ids][:-1]
            assert outcome.routing is not None and outcome.routing.missing == ()
            assert (outcome.num_cached > 0) == (is_cached and len(request.prompt_ids) > GRID)
            np.testing.assert_array_equal(outcome.rows, outputs_of(fed)[1].swapaxes(0, 1))
    cycle.scheduler.flush()


@pytest.mark.slow
def test_company_does_not_show(runner: HostRunner, card: ModelCard):
    """vllm#42960, #48613 (attempts #45819, #49827, #55868): batch invariance ends at these layers.

    Bits of the layer do not depend on company (tests/unit/kernels/test_gated_delta.py). Products by XLA round otherwise
    in other shapes, so that log-probs of the model agree within their tolerance.
    """
    requests = mixed_workload()
    assert_all_same(run_together(runner, card, requests, way=WAY), run_alone(runner, card, requests, way=ALONE))


def test_a_bfloat16_model_rounds_neither_states_nor_what_they_decay_by(checkpoint: Path):
    """sglang#33515: the place where float32 becomes bfloat16 changes greedy text.

    Prefill and decode call one function (tests/unit/kernels/test_gated_delta.py), whose states, decays and norms are
    float32; its inputs are rounded once.
    """
    runner = new_runner(checkpoint, dtype="bfloat16", cpu_kernels="off")
    runner.load()
    weights, in_float32 = runner.weights.params["gated_delta"], {"norm_LD", "decay_LH", "decay_bias_LH", "norm_Lv"}
    assert {name for name, array in weights.items() if array.dtype == jnp.float32} == in_float32
    pools = runner.served.state(NUM_PAGES).pools
    assert {array.dtype.name for array in pools["delta"]} == {"float32"}
    assert {array.dtype.itemsize for array in pools["kv"]} == {2}, "the model's keys and values are rounded"
