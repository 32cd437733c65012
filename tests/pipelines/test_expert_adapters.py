"""Adapters of experts beside the weights: experts move, adapters come and go, and no answer changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from tests.pipelines.conftest import EngineStore
from tests.pipelines.test_unmerged_adapters import ask, outputs
from tests.support.checkpoints.adapters import make_adapter_beside
from tests.support.engine.shared_settings import MOVING, ONE_BUCKET
from tests.support.experts.placements import random_placement

pytestmark = pytest.mark.slow
PLAIN: dict[str, Any] = {**ONE_BUCKET, **MOVING, "expert_backend": "all_to_all"}
BESIDE: dict[str, Any] = {**PLAIN, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 4, "lora_experts": True}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40)]
LAYOUTS = {"a0": "fused", "a1": "shared_outer", "a2": "per_expert"}
KEYS = [(name, place) for name in (None, *LAYOUTS) for place in range(len(PROMPTS))]
WITHIN_S = 600.0


@pytest.fixture
def engine(engine_with: EngineStore, core_checkpoint: Path, tmp_path: Path) -> Iterator[Engine]:
    """Engine with three adapters of every matrix and two resident slots."""
    engine = engine_with(**BESIDE)
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        made = make_adapter_beside(core_checkpoint, seed=seed, rank=2 + seed, experts=layout)
        outcome = engine.load_lora_adapter(made.write(tmp_path / name), lora_name=name)
        assert outcome.success, outcome.message
    yield engine
    for name in LAYOUTS:
        assert engine.unload_lora_adapter(name).success


def answers_alone(engine: Engine) -> dict[Any, Any]:
    """Answer every prompt with every adapter and none, one after the other."""
    engine.flush_cache()
    return {(name, place): outputs(ask(engine, PROMPTS[place], name)) for name, place in KEYS}


def test_moving_experts_take_their_adapters_along(engine: Engine, engine_with: EngineStore, core_checkpoint: Path):
    """Answers keep their bits during moves, under other placements with replicas, and after an update of weights."""
    wanted, eplb = answers_alone(engine), engine.loop.eplb
    plain = engine_with(**PLAIN)
    for place, prompt in enumerate(PROMPTS):
        assert wanted[None, place] == outputs(ask(plain, prompt, None))
        assert len({str(wanted[name, place]) for name in (None, *LAYOUTS)}) == 1 + len(LAYOUTS)
    start, deadline = eplb.migration.placement, time.monotonic() + WITHIN_S
    num_compilations = engine.runner.num_compilations_since_start
    for seed in range(2):
        version = eplb.order(random_placement(start, seed=seed))
        while eplb.migration.progress.version < version or not eplb.migration.progress.is_done:
            assert time.monotonic() < deadline, "experts do not move"
            assert answers_alone(engine) == wanted
    assert (eplb.migration.placement.expert_of_slot != start.expert_of_slot).any()
    assert answers_alone(engine) == wanted
    assert engine.update_weights_from_disk(core_checkpoint).success
    after = {key: found[:2] for key, found in answers_alone(engine).items()}
    assert after == {key: found[:2] for key, found in wanted.items()}
    assert engine.runner.num_compilations_since_start == num_compilations


def test_adapters_of_experts_and_none_in_a_batch_are_each_answered_as_alone(
    engine: Engine, assert_alike: Callable[[Any, Any], None]
):
    """Three adapters take turns in two resident slots."""
    wanted = answers_alone(engine)
    loads = engine.loop.statistics()["adapter_loads"]
    engine.flush_cache()
    with ThreadPoolExecutor(len(KEYS)) as pool:
        asked = {(name, place): pool.submit(ask, engine, PROMPTS[place], name) for name, place in KEYS}
    for key, answer in asked.items():
        assert_alike(outputs(answer.result()), wanted[key])
    assert engine.loop.statistics()["adapter_loads"] > loads, "three adapters do not fit at once"
