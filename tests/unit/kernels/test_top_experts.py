"""The kernel of a router chooses what the reference chooses, and weighs it by the same bits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import gates_of, rank_experts, router_of_layer, select_top_k
from rayserve_moe.kernels.reference.layers import router_scores
from rayserve_moe.kernels.tpu.top_experts import StackedRouter, choose_experts, unsupported_reason

TOKENS, WIDTH, LAYERS, EXPERTS, LAYER = 6, 16, 3, 128, 1
SPECS = {
    "softmax": RouterSpec(EXPERTS, 8, renormalize=True),
    "plain": RouterSpec(EXPERTS, 5, renormalize=False, logit_bias=True),
    "sigmoid": RouterSpec(EXPERTS, 8, renormalize=True, score="sigmoid", selection_bias=True, scale=2.5),
}


def routers(spec: RouterSpec, *, step: float) -> tuple[jax.Array, StackedRouter]:
    """Tokens and routers whose numbers are multiples of `step`, so that a coarse one makes many scores equal."""
    generator = np.random.default_rng(3)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(np.round(generator.standard_normal(shape) / step) * step, jnp.float32)

    biases = (drawn(LAYERS, EXPERTS) if has else None for has in (spec.logit_bias, spec.selection_bias))
    return drawn(TOKENS, WIDTH), StackedRouter(drawn(LAYERS, WIDTH, EXPERTS), *biases, jnp.int32(LAYER))


def chosen_by_kernel(hidden: jax.Array, stacked: StackedRouter, spec: RouterSpec):
    choose = partial(choose_experts, top_k=spec.top_k, score=spec.score, interpret=True)
    return jax.jit(lambda hidden, stacked: choose(hidden, stacked, finish=partial(gates_of, router=spec)))(
        hidden, stacked
    )


def chosen_by_reference(hidden: jax.Array, stacked: StackedRouter, spec: RouterSpec):
    def choose(hidden: jax.Array, stacked: StackedRouter):
        router = router_of_layer(stacked)
        scores = router_scores(hidden, router.matrix_DE, bias_E=router.logit_bias_E, score=spec.score)
        return select_top_k(rank_experts(scores, router=spec, selection_bias_E=router.selection_bias_E), router=spec)

    return jax.jit(choose)(hidden, stacked)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [1e-6, 1.0], ids=["apart", "ties"])
@pytest.mark.parametrize("name", SPECS)
def test_ids_are_those_of_the_reference_and_weights_but_for_rounding(name, step):
    hidden, stacked = routers(SPECS[name], step=step)
    (ids, gates), expected = (
        choose(hidden, stacked, SPECS[name]) for choose in (chosen_by_kernel, chosen_by_reference)
    )
    np.testing.assert_array_equal(ids, expected[0])
    # Products and sums may be rounded in another order: a few steps of float32.
    np.testing.assert_allclose(gates, expected[1], rtol=1e-6)


def test_equal_scores_go_to_the_smaller_ids_and_nan_to_some_experts_once_each():
    hidden, stacked = routers(SPECS["softmax"], step=1.0)
    hidden = hidden.at[0].set(0.0).at[1].set(jnp.nan)
    ids, gates = (np.asarray(part) for part in chosen_by_kernel(hidden, stacked, SPECS["softmax"]))
    np.testing.assert_array_equal(ids[0], np.arange(8))
    np.testing.assert_array_equal(gates[0], np.full(8, 0.125, np.float32))
    np.testing.assert_array_equal(ids[1], np.arange(8))
    assert np.isnan(gates[1]).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "call", "reason"),
    [
        pytest.param(8, 96, {}, "96 experts are no multiple of 128", id="experts"),
        pytest.param(1 << 17, EXPERTS, {}, "exceed 1048576 elements", id="tokens"),
        pytest.param(8, EXPERTS, {"is_forced": True}, "experts may be forced", id="forced"),
        pytest.param(8, EXPERTS, {"is_grouped": True}, "experts are chosen within groups", id="groups"),
    ],
)
def test_unsuitable_calls_are_rejected_with_a_reason(tokens, experts, call, reason):
    stacked = StackedRouter(jnp.zeros((1, WIDTH, experts)), None, None, jnp.int32(0))
    hidden = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
    assert reason in unsupported_reason(hidden, stacked, **call)
    assert not unsupported_reason(jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), stacked) or experts != EXPERTS


def test_the_router_of_one_layer_is_not_stacked():
    assert "one layer" in unsupported_reason(jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), None)
