"""What a request gets from the native CPU kernels does not depend on how, when and next to whom it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.kernels.table import CPU, CPU_NATIVE
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.host_runners import new_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.shared_settings import CORE
from tests.support.engine.workload import mixed_workload
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import NATIVE_CORE_CONFIG
from tests.support.models.full_logits import prompt_logits_of

LONGEST = 64
STEP = {"step_tokens": 64}
WAYS = {
    "together": Way(chunk_tokens=64, **STEP),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "few rows, one step after the other": Way(num_rows=3, overlaps=False, **STEP),
    "preemption every 8 steps, all forgotten": Way(intervene=preempt_every(8, forgets=True), **STEP),
    "pages for two long sequences": Way(num_pages=29, **STEP),
}
QUICK = ("chunks that cut pages", "preemption every 8 steps, all forgotten")


def engine_at(path: Path, **settings: object) -> Engine:
    return Engine(str(path), **CORE, **settings)


LATENT = SyntheticModel(
    dict(FAMILY_PRESETS["deepseek-v3-tiny"].config)
    | {
        "num_hidden_layers": 3, "hidden_size": 74, "num_attention_heads": 6, "q_lora_rank": 40, "kv_lora_rank": 36,
        "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 18, "attention_bias": True,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    },
    drawn=Drawn(scale=0.1, norm_jitter=0.2),
)  # fmt: skip
"""Latent attention in widths that are no whole panels, and a shared expert; all experts are selected, none by a tie."""
MODELS = {"head": NATIVE_CORE_CONFIG, "tied": replace(NATIVE_CORE_CONFIG, tie_word_embeddings=True), "latent": LATENT}
CALCULATOR = "calculator"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name != "latent" else ()) for name in (*MODELS, CALCULATOR)],
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    if request.param == CALCULATOR:
        return TRAINED[CALCULATOR]
    return write_checkpoint(tmp_path_factory.mktemp("native") / "model", MODELS[request.param], seed=3)


@pytest.fixture(scope="module")
def native(path: Path) -> Iterator[Engine]:
    with engine_at(path) as engine:
        assert engine.runner.config.kernels.name == CPU_NATIVE.name and engine.runner.served.dtype == "bfloat16"
        yield engine


def workload(engine: Engine) -> list[GenerationRequest]:
    """Over the tokens of its model."""
    size = engine.card.vocab_size
    return [replace(request, prompt_ids=request.prompt_ids % size) for request in mixed_workload()]


@pytest.fixture(scope="module")
def alone(native: Engine) -> Outcomes:
    return run_alone(native.runner, native.card, workload(native), way=Way(chunk_tokens=64, **STEP))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, way in WAYS.items()],
)
def test_outputs_do_not_depend_on_scheduling(native: Engine, alone: Outcomes, way: Way):
    assert_all_same(run_together(native.runner, native.card, workload(native), way=way), alone)


@pytest.mark.slow
def test_logits_are_as_near_to_float32_as_those_of_xla(path: Path, native: Engine):
    """The two round sums at different places. Their streams have 8 bits, so logits differ by some 1 % of their spread;
    where a router is within that of a tie, it may turn. So it is the root of the mean square that is held, over prompts
    enough for routers to turn as often on either side."""
    generator, num_words = np.random.default_rng(0), native.card.vocab_size
    prompts = [generator.integers(0, num_words, LONGEST).tolist() for _ in range(48)]
    runners = native.runner, loaded(path, dtype="bfloat16", cpu_kernels="off"), loaded(path, dtype="float32")
    ours, xla, exact = (np.concatenate([*map(prompt_logits_of(each, longest=LONGEST), prompts)]) for each in runners)
    assert rms(ours - exact) <= 1.25 * rms(xla - exact)
    if path != TRAINED[CALCULATOR]:  # bytes at random bring its trained routers near ties
        assert rms(ours - xla) <= 2**-5 * rms(exact)


def loaded(path: Path, **settings: object) -> HostRunner:
    runner = new_runner(path, **settings)
    assert runner.config.kernels.name == CPU.name
    runner.load()
    return runner


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.slow
def test_two_devices_have_kernels_of_their_own(path: Path):
    """Partial sums of two devices round otherwise than one sum, so only the laws are the same."""
    with engine_at(path, cpu_kernels="native", devices_per_host=2) as engine:
        way = Way(chunk_tokens=64, **STEP)
        alone = run_alone(engine.runner, engine.card, workload(engine), way=way)
        assert_all_same(run_together(engine.runner, engine.card, workload(engine), way=way), alone)
