"""Attention over cached latents is attention over the keys and values that they expand to, however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.kernels.latent_cases import LatentModel, Weights
from tests.unit.kernels.latent_runs import CUTS, LAYER, LENGTH, NUM_PAGES, PAGE, PAGES, THETA, drawn, run

MODELS = {
    "queries of a latent": LatentModel(),
    "queries of the hidden state": LatentModel(q_lora=None),
    "biases, a scale, and pairs of neighbours": LatentModel(bias=True, score_scale=0.45, interleaved=True),
    "queries that grow": LatentModel(query_scale=(0.5, 7)),
    "one head, wide values": LatentModel(heads=1, value=24, nope=4),
}


@pytest.mark.parametrize(
    ("model", "cut"),
    [*((name, "a prompt, then decoding") for name in MODELS), *((next(iter(MODELS)), cut) for cut in CUTS)],
)
def test_it_is_attention_over_expanded_keys_and_values(model, cut):
    model, chunks = MODELS[model], CUTS[cut]
    hidden, weights = drawn(model), model.weights()
    found, _ = run(model, weights, hidden, chunks)
    expected = model.dense(hidden, weights, layer=LAYER, theta=THETA)
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


def test_the_cache_holds_one_latent_and_one_rotated_key_of_a_token_in_its_own_layer_alone():
    model = MODELS["queries of a latent"]
    hidden, weights = drawn(model), model.weights()
    _, pool = run(model, weights, hidden, [LENGTH])
    by_layer = np.asarray(pool).reshape(model.num_layers, NUM_PAGES, PAGE, -1)
    assert np.isnan(by_layer[1 - LAYER]).all()
    rows = by_layer[LAYER][PAGES].reshape(-1, model.kv_lora + model.rope)
    expected = model.cached(hidden, weights, layer=LAYER, theta=THETA)
    np.testing.assert_allclose(rows[:LENGTH], expected, atol=1e-5)
    assert np.isnan(rows[LENGTH:]).all()


@pytest.mark.parametrize(
    "change", [{"norm_eps": 1e-6}, {"score_scale": 0.4}, {"interleaved": True}, {"query_scale": (0.5, 7)}], ids=str
)
def test_what_is_configured_shows_in_what_outputs_are_held_to(change):
    model = MODELS["queries of a latent"]
    hidden, weights = drawn(model), model.weights()
    expected, changed = (m.dense(hidden, weights, layer=LAYER, theta=THETA) for m in (model, replace(model, **change)))
    assert np.abs(changed - expected).max() > 1e-3 * np.abs(expected).max()


def test_devices_with_some_of_the_heads_add_up_to_all_of_them_and_hold_the_same_cache():
    model, cut = MODELS["queries of a latent"], "a prompt, then decoding"
    hidden, weights = drawn(model), model.weights()
    whole, pool = run(model, weights, hidden, CUTS[cut])
    part = replace(model, heads=model.heads // 2)
    shares = [run(part, share, hidden, CUTS[cut]) for share in shares_of(weights)]
    np.testing.assert_allclose(sum(out for out, _ in shares), whole, atol=1e-5)
    for _, of_share in shares:
        np.testing.assert_array_equal(of_share, pool)


def shares_of(weights: Weights) -> list[Weights]:
    """The weights of the first and of the second half of the heads."""
    split = {"q_b_LRH": -1, "k_b_LHC": 1, "v_b_LHC": 1, "o_LHD": 1}
    return [
        {name: np.split(w, 2, split[name])[half] if name in split else w for name, w in weights.items()}
        for half in (0, 1)
    ]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "bound"),
    [(jnp.bfloat16, jnp.bfloat16, 0.03), (jnp.float32, jnp.bfloat16, 0.01), (jnp.float32, jnp.float8_e4m3fn, 0.08)],
)
def test_narrow_weights_and_caches_stay_near_the_definition(dtype, pool_dtype, bound):
    model = MODELS["queries of a latent"]
    hidden, weights = drawn(model), model.weights()
    found, _ = run(model, weights, hidden, CUTS["a prompt, then decoding"], dtype=dtype, pool_dtype=pool_dtype)
    expected = model.dense(hidden, weights, layer=LAYER, theta=THETA)
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)


def test_what_an_8_bit_cache_cannot_hold_becomes_its_largest_number():
    model = MODELS["queries of a latent"]
    weights = model.weights()
    weights["kv_a_norm_LC"] = weights["kv_a_norm_LC"] * 1e4
    found, _ = run(model, weights, drawn(model), CUTS["one prompt"], pool_dtype=jnp.float8_e4m3fn)
    assert np.isfinite(found).all()
