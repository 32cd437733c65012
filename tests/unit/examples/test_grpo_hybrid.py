"""The hybrid calculator of the GRPO example: what is trained is what is served, and training lowers its loss."""

from __future__ import annotations

import random
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.grpo import hybrid
from examples.grpo.model import WEIGHTS_FILE, Architecture, checkpoint_tensors, read_architecture, read_params
from examples.grpo.policy import score
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.checkpoints.synthetic_tokenizer import MIN_VOCAB_SIZE
from tests.support.engine.host_runners import new_runner
from tests.support.models.full_logits import prompt_outputs_of

LENGTH = 70
"""Tokens of a row: more than from one entry of the server to the next."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that states and experts matter."""
    config = {**hybrid.CONFIG, "vocab_size": MIN_VOCAB_SIZE}
    model = SyntheticModel(config, drawn=Drawn(scale=0.15, norm_jitter=0.2))
    return write_checkpoint(tmp_path_factory.mktemp("hybrid") / "model", model, seed=3)


@pytest.fixture(scope="module")
def architecture(checkpoint: Path) -> Architecture:
    return read_architecture(checkpoint)


def test_weights_come_back_by_the_names_and_shapes_of_the_checkpoint(checkpoint: Path, architecture: Architecture):
    stored = load_file(checkpoint / WEIGHTS_FILE)
    sent = checkpoint_tensors(read_params(checkpoint, architecture), architecture)
    assert sent.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(sent[name].astype(np.float32), tensor.astype(np.float32), err_msg=name)


def test_the_policy_computes_and_replays_as_the_server_does(checkpoint: Path, architecture: Architecture):
    runner = new_runner(checkpoint, dtype="float32", cpu_kernels="off")
    runner.load()
    ids = np.random.default_rng(0).integers(3, 256, LENGTH)
    outputs = prompt_outputs_of(runner, longest=LENGTH)(ids.tolist())
    wanted, experts_MTK = outputs.logits_TV, outputs.ids_MTK
    params, rows_BTLK = read_params(checkpoint, architecture), experts_MTK.swapaxes(0, 1)[None]
    compiled = jax.jit(lambda rows, replay: score(params, ids[None], rows, replay_BT=replay, architecture=architecture))
    free, own_BTLK = compiled(np.zeros_like(rows_BTLK), np.zeros((1, LENGTH), bool))
    np.testing.assert_allclose(free[0], wanted, rtol=0, atol=2e-4 * np.ptp(wanted))
    assert (np.sort(own_BTLK) == np.sort(rows_BTLK)).mean() > 0.999
    replayed, _ = compiled(rows_BTLK, np.ones((1, LENGTH), bool))
    np.testing.assert_allclose(replayed[0], wanted, rtol=0, atol=2e-4 * np.ptp(wanted))
    shifted, _ = compiled(np.roll(rows_BTLK, 1, axis=1), np.ones((1, LENGTH), bool))
    assert np.abs(shifted[0] - wanted).max() > 0.05 * np.ptp(wanted)


@pytest.mark.slow
def test_training_lowers_the_loss(architecture: Architecture):
    params = hybrid.initial_params(architecture, seed=0)
    optimizer = hybrid.muon_and_adam(params, steps=20)
    state, step, generator = optimizer.init(params), hybrid.compile_step(architecture, optimizer), random.Random(0)
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, hybrid.draw_batch(generator))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(hybrid.CONFIG["vocab_size"]), abs=1e-3), "the head is zero"
    assert losses[-1] < 0.6 * losses[0]
