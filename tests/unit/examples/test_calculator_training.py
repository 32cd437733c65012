"""Training the calculator: the function that is trained is the one that is served, and a step makes it better."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.calculator.accuracy import accuracy_by_task, table
from examples.calculator.batches import training_batches
from examples.calculator.export import read_weights
from examples.calculator.network import initial_weights, score
from examples.calculator.optimizer import Rates, initial_state, orthogonalized, update
from examples.calculator.training import Recipe, mean_answer_loss, rate_scale, train
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from tests.support.models.full_logits import prompt_logits_of

RECIPE = Recipe(steps=24, rows=8, width=32)
PLACES = 512
TEXT = b"37+45=82\n12-45=-33\n999+1="


@pytest.fixture(scope="module")
def trained():
    return read_weights(TRAINED["calculator"])


@pytest.fixture(scope="module")
def logits_of(trained):
    """Logits [B, T, V] of the shipped model; without segments, rows are one."""
    weights, spec = trained
    compiled = jax.jit(
        lambda ids, segments, places: score(weights, ids, segments, spec=spec, places=places), static_argnums=2
    )

    def of(ids, segments=None, *, places=PLACES):
        segments = np.zeros_like(ids) if segments is None else segments
        return np.asarray(compiled(ids, segments, places).logits_BTV)

    return of


def ids_of(*texts):
    return np.stack([np.frombuffer(text, np.uint8).astype(np.int32) for text in texts])


@pytest.mark.slow
def test_the_trained_function_is_the_served_one(logits_of):
    ids = ids_of(TEXT)
    settings = {"dtype": "float32", "max_running_requests": 1, "max_step_tokens": 32, "num_pages": 16}
    with Engine(model_path="trained:calculator", max_model_len=64, **settings) as engine:
        served = prompt_logits_of(engine.runner, longest=ids.size)(ids[0].tolist())
    np.testing.assert_allclose(logits_of(ids)[0], served, rtol=0, atol=2e-4)


def test_a_token_sees_only_earlier_ones_of_its_segment(logits_of):
    ids = ids_of(b"37+45=82\n1+2=3\n", b"99-12=87\n1+2=3\n", b"1+2=3\n1+2=3\n###")
    segments = np.tile(np.repeat([0, 1], [9, 6]).astype(np.int32), (3, 1))
    apart, joined = logits_of(ids, segments)[:, 9:], logits_of(ids)
    np.testing.assert_allclose(apart[0], apart[1], rtol=0, atol=1e-5)
    assert np.abs(joined[0, 9:] - joined[1, 9:]).max() > 1e-2
    # Rotary attention sees distances alone: behind another segment is as good as at the beginning.
    np.testing.assert_allclose(apart[0], joined[2, :6], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_an_expert_leaves_out_what_exceeds_its_places_and_padding_takes_none(logits_of):
    ids = ids_of(b"37+45=82\n", b"\n" * 9, b"\n" * 9)
    segments = np.repeat(np.array([[0], [-1], [-1]], np.int32), 9, axis=1)
    wanted = logits_of(ids, segments)[0]
    np.testing.assert_allclose(logits_of(ids, segments, places=9)[0], wanted, rtol=0, atol=1e-4)
    assert np.abs(logits_of(ids, segments, places=1)[0] - wanted).max() > 1e-2


@pytest.mark.slow
def test_training_lowers_the_loss(small_spec, capsys):
    weights = train(small_spec, RECIPE, report_every=1)
    losses = [float(line.split("answers")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == RECIPE.steps
    assert losses[0] == pytest.approx(np.log(256), abs=1e-3), "the head is zero at first: every byte is as likely"
    assert losses[-1] < 0.6 * losses[0]
    assert all(jnp.isfinite(values).all() for values in jax.tree.leaves(weights))


def test_the_seed_decides_where_training_begins(small_spec):
    first, again, other = (initial_weights(small_spec, seed=seed)["gqa"]["q_LDH"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_rate_rises_stays_and_falls_to_nothing():
    recipe = Recipe(steps=100, warm_up=0.1, constant_until=0.4)
    scales = [rate_scale(step, recipe) for step in range(100)]
    assert scales[:9] == pytest.approx([(i + 1) / 10 for i in range(9)])
    assert scales[9:41] == [1.0] * 32
    assert np.diff(scales[40:]) == pytest.approx([-1 / 60] * 59)
    assert scales[-1] == pytest.approx(1 / 60)


@pytest.mark.parametrize("shape", [(3, 4, 24, 12), (2, 12, 24), (16, 16)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrices = jax.random.normal(jax.random.key(0), shape)
    singular = np.linalg.svd(np.asarray(jax.jit(orthogonalized)(matrices)), compute_uv=False)
    assert 0.6 < np.median(singular) < 1.3 and singular.max() < 1.3


def test_a_step_is_bounded_by_the_rates_however_large_the_gradient():
    rates = Rates(muon_decay=0, adam_decay=0)
    weights = {"gqa": {"q_LDH": jnp.ones((2, 8, 8)), "q_norm_Lh": jnp.ones((2, 8))}}
    gradients = jax.tree.map(lambda values: 1e6 * jax.random.normal(jax.random.key(0), values.shape), weights)
    step = jax.jit(lambda w, g, s: update(w, g, state=s, rate_scale=jnp.float32(1), rates=rates))
    after, state = step(weights, gradients, initial_state(weights))
    moved = jax.tree.map(lambda new, old: np.asarray(new - old), after["gqa"], weights["gqa"])
    assert np.linalg.norm(moved["q_LDH"][0], 2) < 1.3 * rates.muon
    assert np.abs(moved["q_norm_Lh"]).max() < 1.01 * rates.adam
    assert all((values != 0).any() for values in moved.values()) and int(state.num_steps) == 1


def test_only_answers_are_learnt():
    batch = next(training_batches(rows=4, width=32, seed=0))
    logits, noise = np.random.default_rng(0).standard_normal((2, 4, 32, 256)).astype(np.float32)
    is_scored = np.zeros((4, 32, 1), bool)
    is_scored[:, :-1, 0] = batch.answers_BT[:, 1:]
    loss = float(mean_answer_loss(logits, batch))
    assert float(mean_answer_loss(np.where(is_scored, logits, noise), batch)) == pytest.approx(loss, rel=1e-6)
    assert float(mean_answer_loss(noise, batch)) != pytest.approx(loss, rel=1e-3)


@pytest.mark.slow
def test_accuracy_counts_right_answers(trained):
    weights, spec = trained
    found = accuracy_by_task(weights, spec, limit=100)
    assert [count for _, count in found.values()] == [100, 100, 100, 100, 100, 90, 100]
    assert found["sums of 1-2 digits"][0] >= 0.99 and found["sums of 3 digits"][0] >= 0.93
    assert table(found).count("\n") == len(found) + 1
    embedding = weights["embedding"] | {"head_VD": jnp.zeros_like(weights["embedding"]["head_VD"])}
    none = accuracy_by_task(weights | {"embedding": embedding}, spec, limit=10)
    assert {share for share, _ in none.values()} == {0.0}
