"""The GRPO example against a server: weights reach it, right rows pass the guard, wrong ones do not, a run goes on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from examples.grpo import checkpoints
from examples.grpo.batch import batch_of, newest_only
from examples.grpo.evaluation import evaluation
from examples.grpo.kl_law import distribution_of, measure
from examples.grpo.loop import METRICS, POLICIES, Parts, Run, run_to_end
from examples.grpo.model import read_architecture, read_params
from examples.grpo.objective import Objective
from examples.grpo.probe import NUM_PROMPTS, NUM_TOKENS, split_by_sample
from examples.grpo.sampler import Sampler, sample_step
from examples.grpo.settings import GrpoSettings, server_settings
from examples.grpo.trainer import compile_programs, scores_of
from examples.grpo.tunix import TunixSampling
from examples.grpo.update import scores_by_version
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.guard import RefusedBatch, distance_of
from tests.http.conftest import served
from tests.support.engine.step_gate import unhurried, wait_for_tokens

MODEL = TRAINED["calculator"]
SETTINGS = GrpoSettings(steps=3, prompts=4, group=4, probe_every=100, stop_at=2.0, dtype="float32")

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


def test_a_run_that_was_killed_before_its_last_measurement_takes_it(sampler, trainer, tmp_path, monkeypatch):
    """All steps are taken then; what is written beside the checkpoint comes back too."""
    parts, settings = Parts(sampler, *trainer), replace(SETTINGS, steps=1, probe_every=2)
    cut_off = Run(parts, settings, tmp_path)
    monkeypatch.setattr(cut_off, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_to_end(cut_off, report=lambda rows: None)
    (tmp_path / METRICS).write_text('{"step": 0', encoding="utf-8")
    rows = run_to_end(Run(parts, settings, tmp_path), report=lambda rows: None)
    assert [row["step"] for row in rows] == [0, 1] and {"sums", "differences"} <= rows[-1].keys()
    written = [json.loads(line) for line in (tmp_path / METRICS).read_text(encoding="utf-8").splitlines()]
    assert written == json.loads(json.dumps(rows))


def test_the_policy_of_a_step_is_there_once_the_step_counts(sampler, trainer, tmp_path, monkeypatch):
    """So a kill at any moment leaves it, or the step is taken again."""
    parts, settings = Parts(sampler, *trainer), replace(SETTINGS, steps=1, probe_every=1)
    policy = tmp_path / POLICIES / "step-001.safetensors"
    saved, save = [], checkpoints.save

    def note(*arguments, **named):
        saved.append(policy.exists())
        save(*arguments, **named)

    monkeypatch.setattr(checkpoints, "save", note)
    run_to_end(Run(parts, settings, tmp_path), report=lambda rows: None)
    assert saved and all(saved)


def test_a_saved_policy_is_served_and_compared_with_what_was_sent(sampler, trainer, tmp_path):
    architecture = trainer[2]
    Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    (policy,) = (tmp_path / "run" / POLICIES).iterdir()
    distribution = distribution_of(architecture)
    probe = measure(sampler, policy, run="run", architecture=architecture, distribution=distribution)
    assert probe.policy == "step-000" and probe.tokens == NUM_PROMPTS * NUM_TOKENS
    for distance in (probe.replayed, probe.free):
        assert distance.k3 < 1e-6 and distance.exact < 1e-6 and distance.far == 0, "float32 against float32"


def test_weights_may_change_under_samples(sampler, trainer, tmp_path):
    settings = replace(SETTINGS, asynchronous=True, partial=True)
    rows = run_to_end(Run(Parts(sampler, *trainer), settings, tmp_path / "run"), report=lambda rows: None)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and all(row["staleness"] <= 1 for row in rows[1:])
    assert all(row["kl"] < 1e-6 and 0 <= row["left_out"] < 1 for row in rows[1:])


def test_tokens_of_a_sample_that_spans_an_update_are_those_of_their_own_weights(engine, sampler, trainer, tmp_path):
    programs = trainer[0]
    run = Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    run.push()
    keys = iter(jax.random.split(jax.random.key(5), len(run.state.params)))
    moved = {name: w * (1 + 0.2 * jax.random.normal(next(keys), w.shape)) for name, w in run.state.params.items()}
    run.state, run.num_updates = run.state._replace(params=moved), 1
    run._publish()
    sampling = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    requests = [SampleRequest(str(i), list(b"12#34="), sampling, seed=i, count=4) for i in range(4)]
    with ThreadPoolExecutor(1) as pool, unhurried(engine.loop, delay_s=0.02):
        pending = pool.submit(sampler.sample, requests)
        wait_for_tokens(engine.loop, 60)
        run.push(under_way=True)
        rollouts = [rollout for group in pending.result() for rollout in group]
    batch = batch_of([[rollout] for rollout in rollouts], width=46)
    before, after = run.weights
    assert all(set(labels) - {""} == {before, after} for labels in batch.versions_BS)

    def kl(logprobs, of):
        each = [split_by_sample(values, replace(batch, mask_BS=of)) for values in (batch.sampled_BS, logprobs)]
        return distance_of(*each).kl

    own = scores_by_version(programs, batch, run.weights).logprobs_BS
    assert kl(own, batch.mask_BS) < 1e-6
    newest = scores_of(programs, run.weights[after], batch).logprobs_BS
    old = batch.mask_BS & (batch.versions_BS == before)
    assert kl(newest, old) > 1e-2 and kl(newest, batch.mask_BS & ~old) > 1e-6, (
        "neither weights nor rows are of one version"
    )
    trained = newest_only(batch, list(run.weights))
    assert (trained.mask_BS == (batch.mask_BS & ~old)).all()
    as_trained = scores_of(programs, run.weights[after], trained).logprobs_BS
    assert kl(as_trained, trained.mask_BS) < 1e-6


def test_a_run_over_the_protocol_of_tunix_learns_the_sums(engine, trainer, tmp_path):
    """The reward rises from chance to nearly one, and each batch agrees with the server to float32."""
    settings = replace(SETTINGS, steps=24, prompts=24, group=8, tunix=True)
    with TunixSampling(Sampler(lambda: InProcess(engine))) as sampler:
        rows = run_to_end(Run(Parts(sampler, *trainer), settings, tmp_path), report=lambda rows: None)
    rewards = [row["reward"] for row in rows[1:]]
    assert np.mean(rewards[:3]) < 0.65 and np.mean(rewards[-3:]) > 0.85
    assert rows[-1]["held_out"] > rows[0]["held_out"] + 0.3
    assert all(row["kl"] < 1e-6 and row["updated"] for row in rows[1:])
    assert [row["staleness"] for row in rows[1:]] == [0] * len(rewards)


def test_the_server_samples_with_the_weights_that_it_was_sent(sampler, trainer, tmp_path):
    run = Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    run.push()
    run.keep(run.learn(sample_step(sampler, 1, SETTINGS)))
    assert run.rows[-1]["updated"] and run.version == "replay-0-1"
    stale = sample_step(sampler, 2, SETTINGS)
    with pytest.raises(RefusedBatch, match="has version"):
        run.learn(stale)
    run.push()
    with BlockingRolloutClient(sampler._server.url) as client:
        assert client.weight_version() == run.version
    assert run.learn(sample_step(sampler, 2, SETTINGS))["kl"] < 1e-6


def test_a_batch_whose_rows_are_shifted_is_refused_by_that_name(sampler, trainer, tmp_path):
    run = Run(Parts(sampler, *trainer), SETTINGS, tmp_path / "run")
    run.push()
    sampled = sample_step(sampler, 1, SETTINGS)
    shifted = [[with_shifted_rows(rollout)] for (rollout,) in sampled.episodes]
    with pytest.raises(RefusedBatch) as refusal:
        run.learn(sampled._replace(episodes=shifted))
    assert "shifted" in refusal.value.cause and refusal.value.distance.kl > 0.1
