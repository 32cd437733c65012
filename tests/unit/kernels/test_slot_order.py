"""The order of slots is the stable one, whether assignments are compared or sorted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels import slot_order


@pytest.mark.parametrize("most_compared", [0, 1 << 20])
@pytest.mark.parametrize(("shape", "num_slots"), [((1, 1), 1), ((7, 3), 1), ((40, 4), 6), ((33, 8), 200)])
def test_assignments_are_brought_into_the_stable_order_of_their_slots(monkeypatch, most_compared, shape, num_slots):
    monkeypatch.setattr(slot_order, "MOST_COMPARED", most_compared)
    slots = np.random.default_rng(num_slots).integers(0, num_slots + 3, shape)
    order = np.argsort(np.minimum(slots.reshape(-1), num_slots), kind="stable")
    found = slot_order.order_by_slot(jnp.asarray(slots, jnp.int32), num_slots)
    np.testing.assert_array_equal(found.token_P, order // shape[1])
    np.testing.assert_array_equal(np.asarray(found.place_P)[order], np.arange(slots.size))
