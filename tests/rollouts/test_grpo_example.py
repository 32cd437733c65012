"""The GRPO example against a server: weights reach it, right rows pass the guard, wrong ones do not, a run goes on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from examples.grpo.evaluation import evaluation
from examples.grpo.loop import Parts, Run, run_to_end
from examples.grpo.model import read_architecture, read_params
from examples.grpo.objective import Objective
from examples.grpo.sampler import Sampler, sample_step
from examples.grpo.settings import GrpoSettings, server_settings
from examples.grpo.trainer import compile_programs
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.guard import RefusedBatch
from tests.http.conftest import served

MODEL = TRAINED["calculator"]
SETTINGS = GrpoSettings(steps=3, prompts=4, group=4, probe_every=100, stop_at=2.0)

pytestmark = pytest.mark.slow


class InProcess(ExitStack):
    """A server over an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self.url = engine, ""

    def __enter__(self) -> InProcess:
        self.url = self.enter_context(served(self._engine))
        return self


@pytest.fixture(scope="module")
def engine():
    small = {"max_running_requests": 16, "precompile_bs_paddings": [16], "max_step_tokens": 128, "num_pages": 64}
    with Engine(**server_settings(SETTINGS, model=MODEL) | small) as engine:
        yield engine


@pytest.fixture
def sampler(engine):
    with Sampler(lambda: InProcess(engine)) as sampler:
        yield sampler


@pytest.fixture(scope="module")
def trainer():
    architecture = read_architecture(MODEL)
    programs = compile_programs(architecture, learning_rate=SETTINGS.learning_rate, objective=Objective())
    return programs, evaluation(architecture), architecture, read_params(MODEL, architecture)


def with_shifted_rows(rollout):
    rows = rollout.routing.rows
    return replace(rollout, routing=replace(rollout.routing, rows=np.concatenate([rows[:1], rows[:-1]])))


def said(run):
    return [(row["step"], row.get("reward"), row.get("tokens"), row.get("version")) for row in run.rows]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(sampler, trainer, tmp_path, asynchronous):
    parts = Parts(sampler, *trainer)
    settings = replace(SETTINGS, asynchronous=asynchronous)
    whole = Run(parts, settings, tmp_path / "whole")
    run_to_end(whole, report=lambda rows: None)
    first = Run(parts, replace(settings, steps=2), tmp_path / "parted")
    run_to_end(first, report=lambda rows: None)
    second = Run(parts, settings, tmp_path / "parted")
    assert said(second) == said(first) == said(whole)[:3] and second.num_updates == first.num_updates
    run_to_end(second, report=lambda rows: None)
    assert [row["step"] for row in second.rows] == [0, 1, 2, 3]
    staleness = [row["staleness"] for row in whole.rows[1:]]
    assert staleness == ([0, 1, 1] if asynchronous else [0, 0, 0])
    assert all(row["kl"] < 1e-6 for row in (*whole.rows[1:], *second.rows[1:])), "float32 against float32"
    if not asynchronous:  # what was drawn ahead is drawn again, by newer weights
        assert said(second) == said(whole)
        assert second.rows[-1]["held_out"] == pytest.approx(whole.rows[-1]["held_out"], abs=1e-3)


def test_the_server_samples_with_the_weights_that_it_was_sent(sampler, trainer, tmp_path):
    run = Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    run.push()
    run.keep(run.learn(sample_step(sampler, 1, SETTINGS)))
    assert run.rows[-1]["updated"] and run.version == "replay-0-1"
    stale = sample_step(sampler, 2, SETTINGS)
    with pytest.raises(RefusedBatch, match="is of version"):
        run.learn(stale)
    run.push()
    with BlockingRolloutClient(sampler._server.url) as client:
        assert client.weight_version() == run.version
    assert run.learn(sample_step(sampler, 2, SETTINGS))["kl"] < 1e-6


def test_a_batch_whose_rows_are_shifted_is_refused_by_that_name(sampler, trainer, tmp_path):
    run = Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    run.push()
    sampled = sample_step(sampler, 1, SETTINGS)
    shifted = [with_shifted_rows(rollout) for rollout in sampled.rollouts]
    with pytest.raises(RefusedBatch) as refusal:
        run.learn(sampled._replace(rollouts=shifted))
    assert "shifted" in refusal.value.cause and refusal.value.distance.kl > 0.1
