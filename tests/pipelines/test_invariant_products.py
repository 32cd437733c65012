"""With `invariant_products` a token has the same bits in any step, by XLA as by the native kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.execution import native_kernels
from rayserve_moe.kernels.table import CPU, CPU_INVARIANT
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.rollouts.guard import distance_of
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.models.core import CORE_CONFIG
from tests.support.speculation.oracle_proposer import Oracle
from tests.support.speculation.random_requests import SPECULATES, check_mix

MAX_ROWS, MAX_DRAFTS = 64, 7
SETTINGS = {
    "invariant_products": "on",
    "max_running_requests": MAX_ROWS,
    "precompile_bs_paddings": [1, 16, MAX_ROWS],
    "max_step_tokens": 512,
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": MAX_DRAFTS,
}
OTHER_SIZES = {"precompile_bs_paddings": [8, MAX_ROWS], "max_step_tokens": 96}
"""Settings of a replica that compiles other sizes of steps."""
slow = partial(pytest.param, marks=pytest.mark.slow)
WAYS = [
    pytest.param(Way(num_rows=MAX_ROWS), id="company"),
    slow(Way(num_rows=2), id="two at a time"),
    slow(Way(chunk_tokens=1), id="chunks of 1"),
    pytest.param(Way(chunk_tokens=7, step_tokens=48), id="chunks of 7 that cut pages"),
    pytest.param(Way(chunk_tokens=64, intervene=preempt_every(8, forgets=True)), id="chunks of 64, preempted"),
    slow(Way(chunk_tokens=100), id="chunks of 100"),
    slow(Way(chunk_tokens=512, step_tokens=512), id="chunks of 512"),
    slow(Way(caches_prefixes=False, intervene=preempt_every(11)), id="nothing cached, preempted"),
]


def workload() -> list[GenerationRequest]:
    """Prompts from 1 to 450 tokens, greedy and drawn, one choice and several."""
    long = request_for(draw_prompt(np.random.default_rng(5), 450), "long", max_new_tokens=8)
    return [*mixed_workload()[1::3], long]


def crowd(size: int) -> list[GenerationRequest]:
    """Return other requests, whose results are ignored."""
    generator = np.random.default_rng(size)
    lengths = generator.integers(1, 40, size)
    requests = [request_for(draw_prompt(generator, n), f"other {i}", max_new_tokens=12) for i, n in enumerate(lengths)]
    return [replace(request, speculative=False) for request in requests]


@pytest.fixture(scope="module")
def invariant(engine_with: EngineStore, is_native: bool) -> Engine:
    return engine_with(**SETTINGS, cpu_kernels="native" if is_native else "off")


@pytest.fixture(scope="module")
def expected(invariant: Engine) -> Outcomes:
    return run_alone(invariant.runner, invariant.card, workload())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_show_in_any_bit(invariant: Engine, expected: Outcomes, way: Way):
    assert invariant.runner.config.kernels.name in ("cpu_invariant", "cpu_native")
    assert_identical(run_together(invariant.runner, invariant.card, workload(), way=way), expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 22, 53])
def test_a_batch_does_not_show_in_any_bit(invariant: Engine, expected: Outcomes, size: int):
    """Run with other requests, up to 64 sequences in all."""
    found = run_together(invariant.runner, invariant.card, [*crowd(size), *workload()], way=Way(num_rows=MAX_ROWS))
    assert_identical({key: found[key] for key in expected}, expected)


@pytest.mark.slow
def test_a_cached_prompt_does_not_show_in_any_bit(invariant: Engine, expected: Outcomes):
    cycle = cycle_for(invariant.runner, invariant.card, Way(chunk_tokens=100))
    for _ in range(2):
        found = run_on(cycle, invariant.card, workload())
        assert_identical(found, expected)
    assert found["long", 0].num_cached > 0
    cycle.scheduler.flush()


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 3, MAX_DRAFTS])
def test_right_and_wrong_drafts_do_not_show_in_any_bit(invariant: Engine, expected: Outcomes, num_drafts: int):
    oracle = Oracle(expected, share=0.8, vocab_size=CORE_CONFIG.vocab_size)
    way = Way(proposer=oracle, num_drafts=num_drafts, chunk_tokens=64, intervene=preempt_every(9))
    assert_identical(run_together(invariant.runner, invariant.card, workload(), way=way), expected)


@pytest.mark.slow
def test_a_replica_with_other_steps_has_the_same_bits(engine_with: EngineStore, expected: Outcomes, is_native: bool):
    other = engine_with(**{**SETTINGS, **OTHER_SIZES}, cpu_kernels="native" if is_native else "off")
    way = Way(num_rows=MAX_ROWS, step_tokens=96, chunk_tokens=96)
    assert_identical(run_together(other.runner, other.card, workload(), way=way), expected)


@pytest.mark.slow
def test_a_prompt_that_was_sampled_scores_as_it_was_sampled(invariant: Engine):
    check_scores(invariant)


def check_scores(invariant: Engine, *, way: Way | None = None) -> None:
    prompt = draw_prompt(np.random.default_rng(2), 37)
    request = request_for(prompt, max_new_tokens=60, temperature=1.0, seed=8)
    outcome = run_alone(invariant.runner, invariant.card, [request], way=way)["r", 0]
    again = replace(request_for([*prompt, *outcome.ids], max_new_tokens=0), score_prompt_from=36)
    found = run_alone(invariant.runner, invariant.card, [again], way=way)["r", 0].prompt
    assert found is not None
    sampled, scored = np.array(outcome.logprobs, np.float32), found.columns["logprobs"]
    np.testing.assert_array_equal(scored, sampled)
    assert (np.exp(scored - sampled) == 1).all(), "the ratio of an on-policy step of GRPO is 1"
    assert distance_of([sampled], [scored], max_kl=0).likely_cause is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_drafts_do_not_show_in_any_bit(engine_with: EngineStore, is_native: bool, seed: int):
    engine = engine_with(
        **{**SPECULATES, "invariant_products": "on", "cpu_kernels": "native" if is_native else "off"},
        enable_return_routed_experts=True,
    )
    check_mix(engine, seed, count=16)


@pytest.mark.slow
@pytest.mark.float32("native kernels have no free tile")
def test_one_product_with_a_free_tile_shows(core_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """Free the tile of the dense layer. `tests/unit/tools/test_row_sums.py` finds the other planted tiles by shapes."""
    monkeypatch.setitem(native_kernels.INVARIANT, "cpu", replace(CPU_INVARIANT, mlp=CPU.mlp))
    few = {"invariant_products": "on", "precompile_bs_paddings": [1, 16], "compile_cache": "off"}
    runner, card = prepared_runner(core_checkpoint, **{**TWO_SHAPES, **few}), card_of(core_checkpoint)
    alone = run_alone(runner, card, mixed_workload(), way=WAY)
    together = run_together(runner, card, mixed_workload(), way=WAY)
    assert any(outcome.logprobs != together[key].logprobs for key, outcome in alone.items())
