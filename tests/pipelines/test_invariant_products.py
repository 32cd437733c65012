"""With `invariant_products` a token has the same bits in any step, by XLA as by the native kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe import Engine
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.speculation.random_requests import SPECULATES, check_mix

WAYS = {
    "together": Way(),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "chunks of 64, preemption, an emptied cache": Way(chunk_tokens=64, intervene=preempt_every(8, forgets=True)),
}
SETTINGS = {"invariant_products": "on", "precompile_bs_paddings": [1, 4, 16]}


@pytest.fixture(scope="module")
def invariant(engine_with: EngineStore, is_native: bool) -> Engine:
    return engine_with(**SETTINGS, cpu_kernels="native" if is_native else "off")


@pytest.fixture(scope="module")
def expected(invariant: Engine) -> Outcomes:
    return run_alone(invariant.runner, invariant.card, mixed_workload())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_step_does_not_show_in_any_bit(invariant: Engine, expected: Outcomes, way: Way):
    assert invariant.runner.config.kernels.name in ("cpu_invariant", "cpu_native")
    assert_identical(run_together(invariant.runner, invariant.card, mixed_workload(), way=way), expected)


def test_a_prompt_that_was_sampled_scores_as_it_was_sampled(invariant: Engine):
    prompt = draw_prompt(np.random.default_rng(2), 37)
    request = request_for(prompt, max_new_tokens=60, temperature=1.0, seed=8)
    outcome = run_alone(invariant.runner, invariant.card, [request])["r", 0]
    again = replace(request_for([*prompt, *outcome.ids], max_new_tokens=0), score_prompt_from=36)
    found = run_alone(invariant.runner, invariant.card, [again])["r", 0].prompt
    assert found is not None
    np.testing.assert_array_equal(found.columns["logprobs"], np.array(outcome.logprobs, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_drafts_do_not_show_in_any_bit(engine_with: EngineStore, is_native: bool, seed: int):
    engine = engine_with(
        **{**SPECULATES, "invariant_products": "on", "cpu_kernels": "native" if is_native else "off"},
        enable_return_routed_experts=True,
    )
    check_mix(engine, seed, count=16)
