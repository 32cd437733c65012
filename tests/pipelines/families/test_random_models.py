"""Random models of every family obey the laws of the core model, by the reference kernels and by the native ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, new_runner, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.workload import FIRST_ORDINARY_ID, request_for
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import FAMILY_CONFIGS, FamilyCase
from tests.support.models.full_logits import prompt_logits_of
from tests.support.models.random_configs import random_config

CASES = [FamilyCase(family, seed, random_config(family, seed)) for family in FAMILY_CONFIGS for seed in range(2)]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)]
PAGES = {1: 1500, 4: 600, 16: 200, 33: 200}
"""Pages of a pool by their size."""
KERNELS = {
    "reference": {"dtype": "float32", "cpu_kernels": "off"},
    "native": {"dtype": "bfloat16", "cpu_kernels": "native"},
}
LENGTH = 48


@pytest.fixture
def started() -> list[Engine]:
    """No engine: runners are driven step by step."""
    return []


def written(case: FamilyCase, directory: Path) -> Path:
    need_native_kernels()
    model = SyntheticModel(case.config, drawn=Drawn(0.1, norm_jitter=0.2))
    return write_checkpoint(directory / "model", model, seed=case.variant)


def page_sizes(case: FamilyCase) -> list[int]:
    """Return the page sizes that a model supports; with recurrent layers they divide 64 or are multiples of 64."""
    sizes = {"linear_num_key_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads"}
    is_recurrent = not sizes.isdisjoint(case.config)
    return [size for size in PAGES if not (is_recurrent and 64 % size and size % 64)]


def workload(case: FamilyCase) -> list[GenerationRequest]:
    """Prompts from 1 to 200 tokens, greedy and drawn."""
    draw, generator = random.Random(f"{case.name} prompts"), np.random.default_rng(case.variant)
    requests = []
    for i in range(5):
        prompt = generator.integers(
            FIRST_ORDINARY_ID, case.config["vocab_size"], draw.choice([1, 2, 15, 16, 17, 70, 200])
        )
        sampling = {"temperature": float(i % 2), "seed": i, "max_new_tokens": draw.randint(1, 14)}
        requests.append(request_for(prompt, f"r{i}", **sampling))
    return requests


def assert_rows_are_well_formed(outcomes: Outcomes, requests: list[GenerationRequest], card: ModelCard) -> None:
    for request in requests:
        outcome = outcomes[request.request_id, 0]
        assert outcome.finish is not None and outcome.finish.kind == "length"
        num_rows = len(request.prompt_ids) + len(outcome.ids) - 1
        assert outcome.rows.shape == (num_rows, len(card.routing.layer_ids), card.routing.top_k)
        assert outcome.rows.max() < card.routing.num_experts
        assert (np.diff(np.sort(outcome.rows, axis=-1), axis=-1) > 0).all(), "an expert is chosen twice"


@pytest.mark.parametrize("kernels", KERNELS)
def test_outcomes_do_not_depend_on_scheduling(case: FamilyCase, kernels: str, tmp_path: Path):
    """Nor on what is cached, and there is a row of distinct experts per token and layer."""
    path, page_size = written(case, tmp_path), random.Random(f"{case.name} page").choice(page_sizes(case))
    sizes = {**TWO_SHAPES, "page_size": page_size, "num_pages": PAGES[page_size]}
    captured = {"enable_return_routed_experts": True, "enable_return_indexer_topk": case.has_index}
    runner = prepared_runner(path, **captured, **sizes, **KERNELS[kernels])
    card, way = card_of(path, **captured), replace(WAY, page_size=page_size, num_pages=PAGES[page_size])
    requests = workload(case)
    alone = run_alone(runner, card, requests, way=way)
    assert_rows_are_well_formed(alone, requests, card)
    for changes in ({"chunk_tokens": 7, "num_rows": 3}, {"intervene": preempt_every(13, forgets=True)}):
        assert_all_same(run_together(runner, card, requests, way=replace(way, **changes)), alone)
    cycle = cycle_for(runner, card, way)
    for _ in range(2):
        assert_all_same(run_on(cycle, card, requests), alone)
    cycle.scheduler.flush()


def test_logits_by_native_kernels_are_as_near_to_float32_as_those_of_xla(case: FamilyCase, tmp_path: Path):
    path = written(case, tmp_path)
    ids = np.random.default_rng(case.variant).integers(FIRST_ORDINARY_ID, 512, (8, LENGTH)).tolist()
    xla = {"dtype": "bfloat16", "cpu_kernels": "off"}
    logits = {}
    for name, settings in {**KERNELS, "xla": xla}.items():
        runner = new_runner(path, **settings)
        runner.load()
        logits[name] = np.stack([*map(prompt_logits_of(runner, longest=LENGTH), ids)])
    exact = logits["reference"]
    ours, theirs = (np.median(np.std(logits[name] - exact, axis=-1)) for name in ("native", "xla"))
    assert ours <= 1.4 * theirs
