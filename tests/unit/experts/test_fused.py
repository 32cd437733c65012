"""The fused programs are the dense sum over slots, however they are cut, on any mesh and under any axis names."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rayserve_moe.experts.fused import BlockConfig, fused_ep_moe, fused_ep_moe_from_topk
from rayserve_moe.kernels.expert_products import ACTIVATIONS
from tests.support.expert_cases import QUICK

NUM_TOKENS, NUM_SLOTS, TOP_K, WIDTH, INNER = 29, 16, 4, 24, 8


def mesh_of(data: int, tensor: int, names: tuple[str, str] = ("data", "tensor")) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: data * tensor]).reshape(data, tensor), names)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    shapes = {"w1": (WIDTH, INNER), "w2": (INNER, WIDTH), "w3": (WIDTH, INNER)}
    weights = {
        name: (generator.standard_normal((NUM_SLOTS, *shape)) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    logits = generator.standard_normal((NUM_TOKENS, NUM_SLOTS)).astype(np.float32)
    return weights | {
        "tokens": generator.standard_normal((NUM_TOKENS, WIDTH)).astype(np.float32),
        "logits": logits,
        "topk_ids_physical": np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K].astype(np.int32),
        "topk_weights": generator.random((NUM_TOKENS, TOP_K)).astype(np.float32),
    }


def dense(arrays: dict[str, np.ndarray], activation: str = "silu", **changes: np.ndarray) -> np.ndarray:
    a = {name: array.astype(np.float64) for name, array in (arrays | changes).items()}
    ids = (arrays | changes)["topk_ids_physical"]
    out = np.zeros_like(a["tokens"])
    for token, pick in np.argwhere(ids < NUM_SLOTS):
        slot, row = ids[token, pick], a["tokens"][token]
        gate, up = (jnp.asarray(row @ a[name][slot], jnp.float32) for name in ("w1", "w3"))
        inner = np.asarray(ACTIVATIONS[activation](gate, up), np.float64)
        out[token] += a["topk_weights"][token, pick] * (inner @ a["w2"][slot])
    return out


def run(arrays: dict[str, np.ndarray], mesh: Mesh, *, names: tuple[str, str] = ("data", "tensor"), **options):
    order = ("tokens", "w1", "w2", "w3", "topk_ids_physical", "topk_weights")
    fused = partial(fused_ep_moe_from_topk, mesh, dp_axis_name=names[0], tp_axis_name=names[1], **options)
    return jax.jit(fused, compiler_options=QUICK)(*(arrays[name] for name in order))


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((2, 2), None),
        ((2, 1), BlockConfig(chunk_tokens=4, round_rows=5)),
        pytest.param((1, 1), BlockConfig(chunk_tokens=7), marks=pytest.mark.slow),
        pytest.param((4, 2), BlockConfig(chunk_tokens=2, round_rows=1), marks=pytest.mark.slow),
        pytest.param((1, 8), BlockConfig(chunk_tokens=2, round_rows=64), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_is_the_dense_sum_however_it_is_cut(arrays, shape, config):
    found = run(arrays, mesh_of(*shape), block_config=config)
    np.testing.assert_allclose(found, dense(arrays), atol=1e-5)


def test_picks_beyond_the_slots_go_nowhere_and_one_slot_may_get_all(arrays):
    ids = np.full_like(arrays["topk_ids_physical"], NUM_SLOTS)
    ids[:, 1] = 3
    ids[::3] = NUM_SLOTS + 5
    changes = {"topk_ids_physical": ids}
    found = run(arrays | changes, mesh_of(4, 1), block_config=BlockConfig(round_rows=3))
    np.testing.assert_allclose(found, dense(arrays, **changes), atol=1e-5)
    assert (np.asarray(found)[::3] == 0).all()


def test_axes_have_names_and_activations_too(arrays):
    mesh = mesh_of(2, 1, ("batch", "model"))
    found = run(arrays, mesh, names=("batch", "model"), act_fn="gelu")
    np.testing.assert_allclose(found, dense(arrays, "gelu"), atol=1e-5)


@pytest.mark.slow
def test_with_logits_it_chooses_experts_by_itself(arrays):
    scores = np.exp(arrays["logits"].astype(np.float64))
    picked = np.take_along_axis(scores, arrays["topk_ids_physical"], axis=1)
    weights = picked / picked.sum(axis=1, keepdims=True)
    order = ("tokens", "w1", "w2", "w3", "logits")
    fused = jax.jit(partial(fused_ep_moe, mesh_of(1, 1), top_k=TOP_K), compiler_options=QUICK)
    found = fused(*(arrays[name] for name in order))
    np.testing.assert_allclose(found, dense(arrays, topk_weights=weights), atol=1e-5)


def test_results_have_the_dtype_of_the_tokens(arrays):
    low = {name: array.astype(jnp.bfloat16) for name, array in arrays.items() if name != "topk_ids_physical"}
    found = run(arrays | low, mesh_of(1, 1))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), dense(arrays), atol=0.06)


def test_slots_that_do_not_divide_are_refused(arrays):
    fewer = {name: arrays[name][:15] for name in ("w1", "w2", "w3")}
    with pytest.raises(ValueError, match="15 expert slots do not divide by 2 devices"):
        run(arrays | fewer, mesh_of(2, 1))


def test_an_unknown_activation_is_refused(arrays):
    with pytest.raises(ValueError, match="'tanh' is not one of silu, gelu"):
        run(arrays, mesh_of(1, 1), act_fn="tanh")
