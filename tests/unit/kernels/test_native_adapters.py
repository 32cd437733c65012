"""Native CPU kernels compute adapters as pure JAX does; other tokens do not change a token's bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.adapters import AdapterPair, LayerAdapters, TokenAdapters
from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.table import CPU
from rayserve_moe.model.layers.attention import MIXER as GROUPED
from rayserve_moe.model.layers.latent import MIXER as LATENT
from tests.support.kernels.native_kernels import laid_out, need_native_kernels
from tests.unit.kernels.latent_cases import LatentModel
from tests.unit.kernels.latent_runs import CUTS, LAYER, SLOT, THETA, drawn, run
from tests.unit.kernels.test_native_attention import (
    CASES,
    MIXED,
    MODELS,
    batch_of,
    drawn_hidden,
    drawn_weights,
    natively,
    spec_with,
)
from tests.unit.kernels.test_native_attention import run as attended
from tests.unit.kernels.test_native_latent import rms, rounded

NUM_SLOTS, RANK = 3, 8


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


def pair_of(inputs: int, outputs: int, *, seed: int, num_layers: int = 2) -> AdapterPair:
    random, shape = np.random.default_rng(seed), (num_layers, NUM_SLOTS, RANK)
    return AdapterPair(
        *(jnp.asarray(random.normal(size=(*shape, size)) * 0.15, jnp.bfloat16) for size in (inputs, outputs))
    )


def adapters_of(pairs: dict[str, AdapterPair], slots: list[int], *, layer: int = LAYER) -> LayerAdapters:
    place = jnp.asarray(slots, jnp.int32)
    return LayerAdapters(pairs, jnp.int32(layer), TokenAdapters(jnp.arange(NUM_SLOTS, dtype=jnp.int32), place))


def grouped_pairs(weights: dict[str, jax.Array]) -> dict[str, AdapterPair]:
    names = [name for name in GROUPED.adapted if name in weights]
    return {name: pair_of(*weights[name].shape[1:], seed=seed) for seed, name in enumerate(names)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "model", ["norms of heads", "biases", "keys as values", "softplus gates of heads", "narrow values, scaled"]
)
def test_attention_with_adapters_is_the_pure_layer(model: str):
    spec, batch = spec_with(**MODELS[model]), batch_of(*CASES[MIXED])
    hidden, weights = drawn_hidden(len(batch.positions_T), spec.hidden_size), drawn_weights(spec)
    pairs = grouped_pairs(weights)
    slots = [(t % (NUM_SLOTS + 1)) - 1 for t in range(len(hidden))]
    found, _ = natively(spec, batch, hidden, adapters=adapters_of(pairs, slots))
    expected, _ = attended(CPU, spec, batch, hidden, weights, adapters=adapters_of(pairs, slots))
    base, _ = natively(spec, batch, hidden)
    here = batch.positions_T >= 0
    np.testing.assert_allclose(found[here], expected[here], rtol=2**-6, atol=2**-5 * np.abs(expected[here]).max())
    assert np.abs(found[here] - base[here]).max() > 2**-3 * np.abs(base[here]).max()


def test_a_token_has_the_same_bits_whatever_adapters_are_beside_it():
    """Sequences share no pages, so tokens without an adapter match the base model."""
    spec = spec_with()
    batch = batch_of([(1, 0), (2, 0)], [(0, 0, 8)])
    hidden, pairs = drawn_hidden(10, spec.hidden_size), grouped_pairs(drawn_weights(spec))
    slots = [-1, 1, *[2] * 8]
    mixed, _ = natively(spec, batch, hidden, adapters=adapters_of(pairs, slots))
    base, _ = natively(spec, batch, hidden)
    np.testing.assert_array_equal(mixed[0], base[0])
    for slot in (1, 2):
        same, _ = natively(spec, batch, hidden, adapters=adapters_of(pairs, [slot] * 10))
        np.testing.assert_array_equal(mixed[np.array(slots) == slot], same[np.array(slots) == slot])
    assert (mixed[1:] != base[1:]).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("q_lora", [20, None])
def test_latent_attention_with_adapters_is_as_near_to_merged_weights_as_xla(q_lora: int | None):
    model = LatentModel(q_lora=q_lora, heads=3, value=10)
    weights = {name: rounded(array) for name, array in model.weights().items()}
    hidden, merged, pairs = rounded(drawn(model)), dict(weights), {}
    for seed, name in enumerate(name for name in LATENT.adapted if name in weights):
        is_out_in = name in ("k_b_LHC", "v_b_LHC")
        inputs, outputs = weights[name].shape[:0:-1] if is_out_in else weights[name].shape[1:]
        pairs[name] = pair_of(inputs, outputs, seed=seed)
        a_RI, b_RO = (np.asarray(stack[LAYER, SLOT], np.float32) for stack in pairs[name])
        delta = b_RO.T @ a_RI if is_out_in else a_RI.T @ b_RO
        merged[name] = weights[name] + np.stack([np.zeros_like(delta), delta])
    exact = model.dense(hidden, merged, layer=LAYER, theta=THETA)
    cut = CUTS["a prompt, then decoding"]
    found, _ = run(model, weights, hidden, cut, dtype=jnp.bfloat16, kernels="cpu_native", pairs=pairs)
    xla, _ = run(model, weights, hidden, cut, dtype=jnp.bfloat16, pairs=pairs)
    wide, _ = run(model, weights, hidden, cut, pairs={name: _wide(pair) for name, pair in pairs.items()})
    np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-4)
    assert rms(found - exact) <= 1.25 * rms(xla - exact) and rms(xla - exact) < 0.04 * rms(exact)
    again, _ = run(model, weights, hidden, CUTS["one prompt"], dtype=jnp.bfloat16, kernels="cpu_native", pairs=pairs)
    np.testing.assert_array_equal(again, found)


def _wide(pair: AdapterPair) -> AdapterPair:
    return AdapterPair(*(stack.astype(jnp.float32) for stack in pair))


def test_a_gated_mlp_with_adapters_is_the_pure_one():
    width, inner, num_tokens = 24, 64, 9
    random = np.random.default_rng(0)
    shapes = ((2, width, inner), (2, width, inner), (2, inner, width))
    weights = tuple(jnp.asarray(random.normal(size=shape) * 0.2, jnp.bfloat16) for shape in shapes)
    names = ("gate", "up", "down")
    pairs = {name: pair_of(*shape[1:], seed=seed) for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    hidden = jnp.asarray(random.normal(size=(num_tokens, width)), jnp.bfloat16)
    slots = [(t % (NUM_SLOTS + 1)) - 1 for t in range(num_tokens)]

    def natively_made(slots: list[int] | None, rows: jax.Array = hidden) -> np.ndarray:
        adapters = None if slots is None else adapters_of(pairs, slots)
        packed = tuple(map(laid_out, weights))
        return np.asarray(calls.gated_mlp(rows, packed, layer=jnp.int32(LAYER), names=names, adapters=adapters))

    expected = layers.gated_mlp(
        hidden, weights, layer=jnp.int32(LAYER), names=names, adapters=adapters_of(pairs, slots)
    )
    found, base = natively_made(slots), natively_made(None)
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6 * np.abs(expected).max())
    without = np.array(slots) < 0
    np.testing.assert_array_equal(found[without], base[without])
    assert (found[~without] != base[~without]).any(axis=1).all()
    np.testing.assert_array_equal(natively_made(slots[3:4], hidden[3:4])[0], found[3])


@pytest.mark.parametrize("changes", [{"rank": 4}, {"slot": NUM_SLOTS}, {"inputs": 22}, {"layers": 1}], ids=str)
def test_adapters_that_do_not_fit_are_refused(changes: dict[str, int]):
    width, inner = 24, 64
    weights = tuple(
        jnp.ones(shape, jnp.bfloat16) for shape in ((2, width, inner), (2, width, inner), (2, inner, width))
    )
    a, b = pair_of(changes.get("inputs", width), inner, seed=0, num_layers=changes.get("layers", 2))
    pair = AdapterPair(a, b[:, :, : changes.get("rank", RANK)])
    adapters = adapters_of({"gate": pair}, [0])
    tokens = TokenAdapters(jnp.asarray([changes.get("slot", 0)], jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        jax.block_until_ready(
            calls.gated_mlp(
                jnp.ones((1, width), jnp.bfloat16),
                weights,
                layer=jnp.int32(1),
                names=("gate", "up", "down"),
                adapters=adapters._replace(tokens=tokens),
            )
        )
