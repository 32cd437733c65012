"""The order of assignments and their tiles by the kernel, interpreted, are those of XLA."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.gpu import tile_order

CASES = {
    "any, and elsewhere": (np.random.default_rng(1).integers(0, 8, (50, 3)), 6, 16),
    "one row": (np.full((1, 1), 2), 4, 16),
    "more than a tile of one": (np.where(np.random.default_rng(2).random((90, 2)) < 0.9, 1, 3), 4, 32),
    "many slots": (np.random.default_rng(3).integers(0, 128, (16, 8)), 128, 16),
    "all elsewhere": (np.full((5, 2), 4), 4, 16),
    "an odd number of slots": (np.random.default_rng(4).integers(0, 60, (20, 4)), 60, 16),
}


def both(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    slots, num_slots, height = CASES[name]
    call = jnp.asarray(slots, jnp.int32), num_slots, height, jnp.int32(7)
    found = tile_order.order_tiles(*call, interpret=True)
    monkeypatch.setattr(tile_order, "MAX_ASSIGNMENTS", 0)
    wanted = tile_order.order_tiles(*call)
    pairs = zip((*found[:2], *found.tiles), (*wanted[:2], *wanted.tiles), strict=True)
    return [(np.asarray(ours), np.asarray(theirs)) for ours, theirs in pairs]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_orders_as_xla(name: str, monkeypatch):
    for ours, theirs in both(name, monkeypatch):
        np.testing.assert_array_equal(ours, theirs)


def test_a_planted_fault_is_found(monkeypatch):
    monkeypatch.setattr(tile_order, "CHUNK", 16)
    monkeypatch.setattr(tile_order, "cdiv", lambda number, size: number // size)
    assert any(np.any(ours != theirs) for ours, theirs in both("any, and elsewhere", monkeypatch))
