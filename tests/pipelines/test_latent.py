"""A model with latent attention answers alike however it is scheduled, cached and spread over devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.checkpoints.synthetic_models import SyntheticModel
from rayserve_moe.execution.host_runner import HostRunner
from rayserve_moe.requests import GenerationRequest, ModelCard
from tests.support.checkpoints import NUM_PAGES, PAGE_SIZE
from tests.support.drive import cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.outcomes import Outcomes, assert_all_same
from tests.support.runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.workload import mixed_workload

MODEL = SyntheticModel(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "max_position_embeddings": 512,
    },
    scale=0.2,
    norm_jitter=0.2,
)
TIGHT = 29
"""Pages for two long sequences."""
RunnerOf = Callable[[tuple[int, int]], HostRunner]


def workload() -> list[GenerationRequest]:
    """Prompts from 2 to 200 tokens, greedy and drawn, one choice and several."""
    return mixed_workload()[:14:2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("latent") / "model", MODEL, seed=5, dtype="float32")


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint)


@pytest.fixture(scope="module")
def runner_of(checkpoint: Path) -> RunnerOf:
    """Compiled runners by their mesh."""
    return cache(lambda mesh: prepared_runner(checkpoint, mesh=mesh, enable_return_routed_experts=True, **TWO_SHAPES))


@pytest.fixture(scope="module")
def alone(runner_of: RunnerOf, card: ModelCard) -> Outcomes:
    """Each request alone on one device."""
    return run_alone(runner_of((1, 1)), card, workload(), way=WAY)


def test_the_pool_holds_one_row_of_latent_and_rotated_key_per_token(runner_of: RunnerOf):
    assert runner_of((1, 1)).state.kv_pages.shape == (3 * NUM_PAGES, PAGE_SIZE, 1, 16 + 4)


@pytest.mark.parametrize(
    "changes",
    [{}, {"chunk_tokens": 7, "num_rows": 3}, {"num_pages": TIGHT, "intervene": preempt_every(23, forgets=True)}],
    ids=["together", "small chunks", "preempted in a small pool"],
)
def test_scheduling_does_not_show(runner_of: RunnerOf, card: ModelCard, alone: Outcomes, changes: dict):
    way = replace(WAY, **changes)
    assert_all_same(run_together(runner_of((1, 1)), card, workload(), way=way), alone)


def test_cached_prompts_come_to_the_same(runner_of: RunnerOf, card: ModelCard, alone: Outcomes):
    cycle = cycle_for(runner_of((1, 1)), card, WAY)
    for _ in range(2):
        found = run_on(cycle, card, workload())
        assert_all_same(found, alone)
    assert all(
        found[request.request_id, 0].num_cached == (len(request.prompt_ids) - 1) // PAGE_SIZE * PAGE_SIZE
        for request in workload()
    )
    cycle.scheduler.flush()


def test_a_mesh_of_two_by_two_is_one_device(runner_of: RunnerOf, card: ModelCard, alone: Outcomes):
    assert_all_same(run_together(runner_of((2, 2)), card, workload(), way=WAY), alone)
