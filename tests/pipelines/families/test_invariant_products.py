"""A token has the same bits in any step, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from rayserve_moe import Engine
from rayserve_moe.config import derive
from tests.pipelines import test_invariant_products as invariance
from tests.pipelines.families.conftest import families
from tests.pipelines.test_invariant_products import MAX_DRAFTS, MAX_ROWS, SETTINGS, crowd, workload
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import Way, preempt_every, run_together
from tests.support.models.core import CORE_CONFIG
from tests.support.speculation.oracle_proposer import Oracle

pytestmark = [pytest.mark.slow, families()]

expected = invariance.expected
PLAIN = Way(num_rows=MAX_ROWS)
MIXES = {
    "chunks of 1, 2 sequences, nothing cached": (Way(chunk_tokens=1, num_rows=2, caches_prefixes=False), 0, 0),
    "chunks of 7, 61 sequences, 7 drafts": (replace(PLAIN, chunk_tokens=7, step_tokens=48), 53, MAX_DRAFTS),
    "chunks of 64, all forgotten, 3 drafts": (
        replace(PLAIN, chunk_tokens=64, intervene=preempt_every(8, forgets=True)),
        7,
        3,
    ),
    "chunks of 100, preempted, 1 draft": (replace(PLAIN, chunk_tokens=100, intervene=preempt_every(11)), 22, 1),
    "chunks of 512": (replace(PLAIN, chunk_tokens=512, step_tokens=512), 1, 0),
}
"""Way of scheduling, number of other requests, and drafts per sequence."""


@pytest.fixture(scope="module")
def invariant(engine_with: EngineStore, is_native: bool) -> Iterator[Engine]:
    """Drafts are verified in the steps that others compile: fewer programs."""
    with patch.object(derive, "MAX_VERIFY_ROWS", MAX_ROWS):
        yield engine_with(**SETTINGS, cpu_kernels="native" if is_native else "off")


@pytest.mark.parametrize(("way", "size", "num_drafts"), MIXES.values(), ids=MIXES.keys())
def test_steps_do_not_show(invariant: Engine, expected: Outcomes, way: Way, size: int, num_drafts: int):
    if num_drafts:
        oracle = Oracle(expected, share=0.8, vocab_size=CORE_CONFIG.vocab_size)
        way = replace(way, proposer=oracle, num_drafts=num_drafts)
    found = run_together(invariant.runner, invariant.card, [*crowd(size), *workload()], way=way)
    assert_identical({key: found[key] for key in expected}, expected)


test_a_cached_prompt_does_not_show = invariance.test_a_cached_prompt_does_not_show_in_any_bit
test_scores = invariance.test_a_prompt_that_was_sampled_scores_as_it_was_sampled
