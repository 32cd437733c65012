"""Attention over cached latents is attention over the keys and values that they expand to, however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.attention_reference import KEYS_PER_SPAN, attend
from rayserve_moe.kernels.latent_attention import LatentConfig, attend_latent_layer
from rayserve_moe.kernels.layers import rotation_of
from tests.unit.kernels.latent_cases import LatentModel, Weights

PAGE, BLOCK, LAYER, THETA, LENGTH = 16, 8, 1, 100.0, KEYS_PER_SPAN + 21
PAGES = np.random.default_rng(3).permutation(np.arange(1, 1 + -(-LENGTH // PAGE))).astype(np.int32)
NUM_PAGES = len(PAGES) + 3
Chunks = list[int]
"""Lengths of the chunks of a sequence, one per step; those of one token are single tokens."""

MODELS = {
    "queries of a latent": LatentModel(),
    "queries of the hidden state": LatentModel(q_lora=None),
    "biases, a scale, and pairs of neighbours": LatentModel(bias=True, score_scale=0.45, interleaved=True),
    "one head, wide values": LatentModel(heads=1, value=24, nope=4),
}
CUTS: dict[str, Chunks] = {
    "one prompt": [LENGTH],
    "a prompt, then decoding": [LENGTH - 5, *[1] * 5],
    "chunks that end within blocks and pages": [3, 41, 30, 60, LENGTH - 134],
}


@cache
def compiled(model: LatentModel):
    config = LatentConfig(model.nope, model.norm_eps, model.scale, model.interleaved)
    frequencies = (THETA ** (-np.arange(0, model.rope, 2) / model.rope)).astype(np.float32)
    kernel = partial(attend_latent_layer, config=config, decode=attend, prefill=attend)

    def layer(hidden: jax.Array, weights: dict[str, jax.Array], pool: jax.Array, batch: TokenBatch):
        rotation = rotation_of(batch.positions_T, frequencies)
        return kernel(hidden, pool, AttentionInputs(weights, batch, rotation, jnp.int32(LAYER)))

    return jax.jit(layer)


def batch_of(first: int, count: int) -> tuple[TokenBatch, slice]:
    """The next tokens of the sequence, as a single token or as blocks of a step that has both, and their places."""
    num_blocks = -(-LENGTH // BLOCK)
    places = slice(0, 1) if count == 1 else slice(1, 1 + count)
    positions = np.full(1 + num_blocks * BLOCK, -1, np.int32)
    positions[places] = np.arange(first, first + count)
    slots = np.where(positions >= 0, PAGES[positions // PAGE] * PAGE + positions % PAGE, 0).astype(np.int32)
    return TokenBatch(
        np.zeros_like(slots), positions, slots, np.tile(PAGES, (1 + num_blocks, 1)), num_singles=1
    ), places


def run(
    model: LatentModel, weights: Weights, hidden: np.ndarray, chunks: Chunks, *, dtype=jnp.float32, pool_dtype=None
) -> tuple[np.ndarray, jax.Array]:
    """Outputs of all tokens [T, D], computed chunk by chunk, and the pool. What no token wrote is NaN."""
    width = model.kv_lora + model.rope
    pool = jnp.full((model.num_layers * NUM_PAGES, PAGE, 1, width), jnp.nan, pool_dtype or dtype)
    arrays, outputs, first = {name: jnp.asarray(array, dtype) for name, array in weights.items()}, [], 0
    for count in chunks:
        batch, places = batch_of(first, count)
        rows = np.zeros((len(batch.positions_T), model.hidden), np.float32)
        rows[places] = hidden[first : first + count]
        out, pool = compiled(model)(jnp.asarray(rows, dtype), arrays, pool, batch)
        assert out.dtype == jnp.float32
        outputs.append(np.asarray(out)[places])
        first += count
    return np.concatenate(outputs), pool


def drawn(model: LatentModel) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((LENGTH, model.hidden)).astype(np.float32)


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


@pytest.mark.parametrize("change", [{"norm_eps": 1e-6}, {"score_scale": 0.4}, {"interleaved": True}], ids=str)
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
    split = dict.fromkeys(("q_b_LRH", "k_b_LCH", "v_b_LCH"), -1) | {"o_LHD": 1}
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
