"""Scores of prompts and drafts: laws of the core model, held over models with recurrent layers."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from tests.pipelines import test_prompt_scores as scores
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every
from tests.support.models.families import FAMILY_CASES, FamilyCase
from tests.support.speculation.random_requests import SPECULATES, check_mix

RECURRENT = (
    *("qwen3_next-0", "qwen3_5_moe_text-0", "kimi_linear-0", "bailing_hybrid-0", "nemotron_h-0", "granitemoehybrid-0"),
)
NEAR_TIES = {"kimi_linear-0": (("scored 2", 0), 89, 0)}
"""Choice, position and MoE layer where two experts may come in either order.

With AVX2 alone the biased scores of the two tie, and rounding depends on how prompts are cut.
"""
CASES = [pytest.param(case, id=case.name) for case in FAMILY_CASES if case.name in RECURRENT]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("case", CASES, indirect=True, scope="session")]

WAYS = {name: way for name, way in scores.WAYS.items() if name != "preemption every 2 steps"}
"""Recurrent layers resume at a multiple of 64 tokens: with 16 tokens a step, two steps bring no progress."""
WAYS["preemption every 3 steps"] = Way(chunk_tokens=64, intervene=preempt_every(3))

alone = scores.alone
test_scores_of_logits = scores.test_scores_are_log_probs_of_the_logits
test_as_sampled = scores.test_a_prompt_that_was_sampled_scores_as_it_was_sampled
test_cached_prefix = scores.test_a_cached_prefix_is_used_up_to_where_scores_begin


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_scores(engine: Engine, alone: Outcomes, way: Way, case: FamilyCase):
    found = scores.scored_among_others(engine, alone, way)
    if case.name in NEAR_TIES:
        choice, position, layer = NEAR_TIES[case.name]
        row, expected_row = found[choice].rows[position, layer], alone[choice].rows[position, layer]
        assert sorted(row) == sorted(expected_row)
        row[:] = expected_row
    assert_all_same(found, alone)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_do_not_show(engine_with: EngineStore, seed: int):
    """Among scores, grammars, forced routing, evidence, penalties and several choices, with preemption."""
    check_mix(engine_with(**SPECULATES), seed, count=24)
