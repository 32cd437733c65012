"""A token has the same bits in any step, for every family.

Prompts are at most as long as a step of few blocks, so that a family takes seconds: the core model has longer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.config import derive
from rayserve_moe.requests.records import GenerationRequest
from tests.pipelines import test_invariant_products as invariance
from tests.pipelines.families.conftest import families
from tests.pipelines.test_invariant_products import MAX_DRAFTS, MAX_ROWS, crowd
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.models.core import CORE_CONFIG
from tests.support.speculation.oracle_proposer import Oracle

pytestmark = [pytest.mark.slow, families()]

STEP_TOKENS = 128
SETTINGS = {
    **invariance.SETTINGS,
    "max_step_tokens": STEP_TOKENS,
    "precompile_bs_paddings": [1, MAX_ROWS],
}
"""Three sizes of steps."""
PLAIN = Way(num_rows=MAX_ROWS, step_tokens=STEP_TOKENS, chunk_tokens=STEP_TOKENS)
MIXES = {
    "chunks of 1, 2 sequences, nothing cached": (
        replace(PLAIN, chunk_tokens=1, num_rows=2, caches_prefixes=False),
        0,
        0,
    ),
    "chunks of 7, 61 sequences, 7 drafts": (replace(PLAIN, chunk_tokens=7, step_tokens=48), 53, MAX_DRAFTS),
    "chunks of 64, all forgotten, 3 drafts": (
        replace(PLAIN, chunk_tokens=64, intervene=preempt_every(8, forgets=True)),
        7,
        3,
    ),
    "chunks of 100, preempted, 1 draft": (replace(PLAIN, chunk_tokens=100, intervene=preempt_every(11)), 22, 1),
    "whole prompts": (PLAIN, 1, 0),
}
"""Way of scheduling, number of other requests, and drafts per sequence."""


def workload() -> list[GenerationRequest]:
    """Prompts from 1 to 120 tokens, greedy and drawn, one choice and several."""
    long = request_for(draw_prompt(np.random.default_rng(5), 120), "long", max_new_tokens=8)
    return [*(request for request in mixed_workload()[1::3] if len(request.prompt_ids) <= STEP_TOKENS), long]


@pytest.fixture(scope="module")
def invariant(engine_with: EngineStore, is_native: bool) -> Iterator[Engine]:
    """Drafts are verified in the steps that others compile: fewer programs."""
    with patch.object(derive, "MAX_VERIFY_ROWS", MAX_ROWS):
        yield engine_with(**SETTINGS, cpu_kernels="native" if is_native else "off")


@pytest.fixture(scope="module")
def expected(invariant: Engine) -> Outcomes:
    return run_alone(invariant.runner, invariant.card, workload(), way=PLAIN)


@pytest.mark.parametrize(("way", "size", "num_drafts"), MIXES.values(), ids=MIXES.keys())
def test_steps_do_not_show(invariant: Engine, expected: Outcomes, way: Way, size: int, num_drafts: int):
    if num_drafts:
        oracle = Oracle(expected, share=0.8, vocab_size=CORE_CONFIG.vocab_size)
        way = replace(way, proposer=oracle, num_drafts=num_drafts)
    found = run_together(invariant.runner, invariant.card, [*crowd(size), *workload()], way=way)
    assert_identical({key: found[key] for key in expected}, expected)


def test_a_cached_prompt_does_not_show(invariant: Engine, expected: Outcomes):
    cycle = cycle_for(invariant.runner, invariant.card, replace(PLAIN, chunk_tokens=100))
    for _ in range(2):
        found = run_on(cycle, invariant.card, workload())
        assert_identical(found, expected)
    assert found["long", 0].num_cached > 0
    cycle.scheduler.flush()


def test_scores(invariant: Engine):
    invariance.check_scores(invariant, way=PLAIN)
