"""Selection is by descending score in float32, ties to the smaller id; counts see real tokens only."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.experts.routing import ForcedExperts, count_tokens, select_top_k
from rayserve_moe.kernels.layers import router_scores


def select_experts(hidden, router, **config):
    return select_top_k(router_scores(hidden, router), **config)


@pytest.mark.parametrize("renormalize", [True, False])
def test_ids_and_weights_are_those_of_a_sorted_softmax(renormalize):
    generator = np.random.default_rng(2)
    hidden = generator.standard_normal((40, 8)).astype(np.float32)
    router = generator.standard_normal((8, 16)).astype(np.float32)
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), top_k=4, renormalize=renormalize)
    logits = hidden.astype(np.float64) @ router
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    expected = np.argsort(-probs, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(ids, expected)
    picked = np.take_along_axis(probs, expected, axis=-1)
    if renormalize:
        picked /= picked.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, picked, rtol=1e-5)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32


def test_ties_go_to_the_smaller_id():
    router = np.zeros((2, 6), np.float32)
    router[0] = [1, 3, 2, 3, 1, 3]
    hidden = np.array([[1, 0], [0, 1]], np.float32)
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), top_k=4, renormalize=True)
    np.testing.assert_array_equal(ids, [[1, 3, 5, 2], [0, 1, 2, 3]])
    np.testing.assert_allclose(weights[1], 0.25)


def test_the_router_is_float32_whatever_the_tokens_are():
    router = np.zeros((1, 2), np.float32)
    router[0] = [1.0, 1.0 + 2**-20]
    ids, weights = select_experts(jnp.ones((1, 1), jnp.bfloat16), jnp.asarray(router), top_k=1, renormalize=False)
    assert ids.tolist() == [[1]]
    assert weights.dtype == jnp.float32


def test_padding_is_not_counted():
    ids = jnp.asarray([[0, 3], [1, 3], [3, 0], [2, 1]])
    valid = jnp.asarray([True, True, False, True])
    np.testing.assert_array_equal(count_tokens(ids, valid, num_experts=5), [1, 2, 1, 2, 0])
    assert int(count_tokens(ids, jnp.zeros(4, bool), num_experts=5).sum()) == 0


@pytest.mark.parametrize("renormalize", [True, False])
def test_forced_tokens_take_what_they_are_told_weighted_by_their_own_scores(renormalize: bool):
    generator = np.random.default_rng(5)
    hidden = generator.standard_normal((10, 8)).astype(np.float32)
    router = generator.standard_normal((8, 16)).astype(np.float32)
    told = np.stack([generator.permutation(16)[:4] for _ in range(6)]).astype(np.int32)
    told[[1, 4]] = -1
    config = {"top_k": 4, "renormalize": renormalize}
    free_ids, free_weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), **config)
    forced = ForcedExperts(jnp.asarray(told), jnp.asarray(True))
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), **config, forced=forced)
    free = [0, 1, 2, 3, 5, 8]
    np.testing.assert_array_equal(ids[jnp.asarray(free)], np.asarray(free_ids)[free])
    np.testing.assert_array_equal(weights[jnp.asarray(free)], np.asarray(free_weights)[free])
    logits = hidden.astype(np.float64) @ router
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    for place in (0, 2, 3, 5):
        np.testing.assert_array_equal(ids[4 + place], told[place])
        expected = probs[4 + place, told[place]]
        np.testing.assert_allclose(weights[4 + place], expected / (expected.sum() if renormalize else 1), rtol=1e-5)


def test_where_nothing_is_forced_the_router_is_free():
    hidden, router = jnp.ones((3, 2)), jnp.asarray(np.random.default_rng(6).standard_normal((2, 8)), jnp.float32)
    forced = ForcedExperts(jnp.full((2, 2), -1), jnp.asarray(False))
    for found, free in zip(
        select_experts(hidden, router, top_k=2, renormalize=True, forced=forced),
        select_experts(hidden, router, top_k=2, renormalize=True),
        strict=True,
    ):
        np.testing.assert_array_equal(found, free)
