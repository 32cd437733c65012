"""The order of slots is the stable one, whether assignments are compared or sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels import slot_order


@pytest.mark.sampled(2)
@pytest.mark.parametrize("most_compared", [0, 1 << 20])
@pytest.mark.parametrize(("shape", "num_slots"), [((1, 1), 1), ((7, 3), 1), ((40, 4), 6), ((33, 8), 200)])
def test_assignments_are_brought_into_the_stable_order_of_their_slots(monkeypatch, most_compared, shape, num_slots):
    monkeypatch.setattr(slot_order, "MAX_COMPARED", most_compared)
    slots = np.random.default_rng(num_slots).integers(0, num_slots + 3, shape)
    order = np.argsort(np.minimum(slots.reshape(-1), num_slots), kind="stable")
    found = slot_order.order_by_slot(jnp.asarray(slots, jnp.int32), num_slots)
    np.testing.assert_array_equal(found.token_P, order // shape[1])
    np.testing.assert_array_equal(np.asarray(found.place_P)[order], np.arange(slots.size))


def test_on_a_tpu_a_permutation_is_undone_by_a_sort_on_a_cpu_by_a_scatter():
    order = jax.ShapeDtypeStruct((2000,), jnp.int32)
    text_of = {
        platform: jax.jit(slot_order.inverse).trace(order).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu")
    }
    assert "stablehlo.scatter" in text_of["cpu"]
    assert "stablehlo.sort" not in text_of["cpu"]
    assert "stablehlo.sort" in text_of["tpu"]
    assert "stablehlo.scatter" not in text_of["tpu"]


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("size", [1, 2, 1999])
def test_a_permutation_is_undone_either_way(monkeypatch, platform, size):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda order, **by_platform: by_platform[platform](order))
    order = np.random.default_rng(size).permutation(size).astype(np.int32)
    found = slot_order.inverse(jnp.asarray(order))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(found)[order], np.arange(size))
