"""Pages behind windows are freed, and nothing of that shows: tokens, log-probs and every routing row stay as they are.

What they are held to is the same model in a pool where every layer keeps all pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.model import states as model_states
from rayserve_moe.model.states import token_states
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.state.paged import PagedState
from tests.support.engine.host_runners import TWO_SHAPES, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for

WINDOW, PAGE, NUM_PAGES = 20, 4, 600
WAY = Way(num_rows=16, step_tokens=32, chunk_tokens=32, page_size=PAGE, num_pages=NUM_PAGES)
TIGHT = 116
"""Pages for two long sequences."""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
}
EVERY_OTHER = SyntheticModel({"architectures": ["GptOssForCausalLM"], **SIZES}, drawn=Drawn(0.2, norm_jitter=0.2))
ALL = SyntheticModel({"architectures": ["MixtralForCausalLM"], **SIZES}, drawn=Drawn(0.2, norm_jitter=0.2))
_SIZES = {"v_head_dim": 12, "n_routed_experts": 8, "moe_intermediate_size": 16, "sliding_window": WINDOW}
TWO_POOLS = SyntheticModel(
    {
        "architectures": ["MiMoV2FlashForCausalLM"],
        **SIZES,
        **_SIZES,
        "partial_rotary_factor": 0.5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    drawn=Drawn(0.2, norm_jitter=0.2),
)
"""Layers with windows have other KV heads than the others, and a pool of their own."""
RunnerOf = Callable[[tuple[int, int]], HostRunner]
pytestmark = pytest.mark.natively


def workload() -> list[GenerationRequest]:
    """Prompts from 2 to 200 tokens, greedy and drawn, one choice and several."""
    return mixed_workload()[:14:2]


def whole_pages(request: GenerationRequest) -> int:
    return (len(request.prompt_ids) - 1) // PAGE * PAGE


def windowed_of(cycle: StepCycle) -> PagedState:
    """The pages of the windowed layers on the first rank."""
    (state,) = cycle.scheduler.ranks[0].states
    assert isinstance(state, PagedState)
    return state


@pytest.fixture(
    scope="module",
    params=[EVERY_OTHER, *(pytest.param(model, marks=pytest.mark.slow) for model in (ALL, TWO_POOLS))],
    ids=["every other layer", "all", "two pools"],
)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, is_native: bool) -> Path:
    dtype = "bfloat16" if is_native else "float32"
    return write_checkpoint(tmp_path_factory.mktemp("windows") / "model", request.param, seed=5, dtype=dtype)


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint)


@pytest.fixture(scope="module")
def runner_of(checkpoint: Path, kernel_settings: dict[str, str]) -> RunnerOf:
    """Compiled runners by their mesh."""
    sizes = {**TWO_SHAPES, "page_size": PAGE, "num_pages": NUM_PAGES, **kernel_settings}
    return cache(lambda mesh: prepared_runner(checkpoint, mesh=mesh, enable_return_routed_experts=True, **sizes))


@pytest.fixture(scope="module")
def unfreed(checkpoint: Path, runner_of: RunnerOf, card: ModelCard) -> Outcomes:
    """Each request alone, on one device where no layer frees anything."""
    with patch.object(model_states, "windows_within", lambda windows, max_tokens: (0,) * len(windows)):
        keeps_all = runner_of.__wrapped__((1, 1))
    assert sum(len(pool) for (pool,) in keeps_all.state.pools.values()) == 3 * NUM_PAGES
    return run_alone(keeps_all, card, workload(), way=WAY)


@pytest.mark.parametrize(
    "changes",
    [{}, {"chunk_tokens": 7, "num_rows": 3}, {"num_pages": TIGHT, "intervene": preempt_every(23, forgets=True)}],
    ids=["together", "small chunks", "preempted in a small pool"],
)
def test_freed_pages_do_not_show(runner_of: RunnerOf, card: ModelCard, unfreed: Outcomes, changes: dict):
    assert_all_same(run_together(runner_of((1, 1)), card, workload(), way=replace(WAY, **changes)), unfreed)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
def test_a_mesh_of_two_by_two_is_one_device(runner_of: RunnerOf, card: ModelCard, unfreed: Outcomes):
    assert_all_same(run_together(runner_of((2, 2)), card, workload(), way=WAY), unfreed)


def test_what_stands_in_freed_pages_is_without_effect(runner_of: RunnerOf, card: ModelCard, unfreed: Outcomes):
    """After every step all pages of windowed layers that no coming query sees hold what is not a number."""
    runner = runner_of((1, 1))
    size, states = runner.served.pool.groups(NUM_PAGES)[0].num_pages, token_states(runner.served.config)
    of_states = dict(runner.served.step_config(NUM_PAGES).layer_pages) or {
        state.kind.name: tuple(LayerPages(0, i * size, size) for i in range(state.num_layers)) for state in states
    }
    num_poisoned = []

    def poison(cycle: StepCycle, step: int) -> None:
        page_of = windowed_of(cycle).place_of
        seen = [s.pages[max(0, s.num_computed + 1 - WINDOW) // PAGE :] for s in cycle.scheduler.running]
        pools = {}
        num_poisoned.append(0)
        for state in states:
            (pool,) = runner.state.pools[state.kind.name]
            is_seen = np.zeros(len(pool), np.bool_)
            for window, (_, first_page, num_pages) in zip(state.windows, of_states[state.kind.name], strict=True):
                pages = page_of[np.concatenate([np.zeros(0, np.int32), *seen])] if window else np.arange(num_pages)
                is_seen[first_page + pages] = True
            num_poisoned[-1] += np.count_nonzero(~is_seen)
            pools[state.kind.name] = (jnp.where(jnp.asarray(is_seen)[:, None, None, None], pool, jnp.nan),)
        runner._state = replace(runner.state, pools=pools)

    chosen = [request for request in workload() if request.sampling.n == 1]
    try:
        found = run_together(runner, card, chosen, way=replace(WAY, chunk_tokens=16, intervene=poison))
    finally:
        runner._state = replace(runner.state, pools=jax.tree.map(jnp.zeros_like, runner.state.pools))
    assert_all_same(found, {key: unfreed[key] for key in found})
    assert min(num_poisoned) > 0


def test_a_long_sequence_keeps_its_last_window_and_all_its_routing_rows(runner_of: RunnerOf, card: ModelCard):
    """Between steps a windowed layer has pages for the window, however long the sequence; in one, those of a chunk."""
    num_in_use: list[int] = []

    def count(cycle: StepCycle, step: int) -> None:
        num_in_use.append(np.count_nonzero(windowed_of(cycle).num_users))

    prompt = draw_prompt(np.random.default_rng(1), 300)
    wanted = request_for(prompt, max_new_tokens=100)
    (outcome,) = run_together(runner_of((1, 1)), card, [wanted], way=replace(WAY, intervene=count)).values()
    assert outcome.routing is not None and outcome.routing.missing == () and len(outcome.rows) == 399
    of_window = -(-WINDOW // PAGE) + 1
    assert max(num_in_use) <= of_window + WAY.chunk_tokens // PAGE
    assert max(num_in_use[20:-1]) <= of_window, "a decoding sequence holds no more than its window"


def test_cached_prefixes_are_found_as_far_as_their_windows_are_there(
    runner_of: RunnerOf, card: ModelCard, unfreed: Outcomes
):
    """Where other sequences took the pages of a window, the hit ends where the pages of one are whole, or at nothing.

    What is computed anew takes their place in the cache.
    """
    cycle = cycle_for(runner_of((1, 1)), card, WAY)
    for request in workload():
        first, second = (run_on(cycle, card, [request]) for _ in range(2))
        assert_all_same(first, {key: unfreed[key] for key in first})
        assert_all_same(second, {key: unfreed[key] for key in second})
        assert second[request.request_id, 0].num_cached == whole_pages(request)
    longest = max(workload(), key=whole_pages)
    others = [request_for(draw_prompt(np.random.default_rng(i), 200), f"o{i}", max_new_tokens=2) for i in range(9)]
    run_on(cycle, card, others)
    found = [run_on(cycle, card, [longest]) for _ in range(2)]
    assert_all_same(found[0], {key: unfreed[key] for key in found[0]})
    assert_all_same(found[1], {key: unfreed[key] for key in found[1]})
    cached = [outcomes[longest.request_id, 0].num_cached for outcomes in found]
    assert cycle.scheduler.ranks[0].tree.num_cached_pages > 9 * 200 // PAGE, "the other layers kept everything"
    assert cached[0] < whole_pages(longest) == cached[1]
    cycle.scheduler.flush()
    assert not windowed_of(cycle).place_of.any()
