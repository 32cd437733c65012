"""Products with each token's own adapter; tokens without one keep the bits of the base model."""

# T tokens   L layers   S resident adapters   N adapters of a step   R rank   I inputs   O outputs

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels import adapters as kernels
from rayserve_moe.kernels.adapters import (
    COPY_MOVES,
    AdapterPair,
    LayerAdapters,
    TokenAdapters,
    with_absorbed,
    with_adapters,
    with_expanded,
)

T, L, S, R, I, O = 6, 2, 5, 8, 24, 16  # noqa: E741 (shape letters)
LAYER = 1


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PAIR = AdapterPair(jnp.asarray(drawn(L, S, R, I, seed=1)), jnp.asarray(drawn(L, S, R, O, seed=2)))
ROWS, BASE = drawn(T, I, seed=3), drawn(T, O, seed=4)
SLOTS = [3, -1, 0, 3, -1, 4]
"""Slot of each token's adapter; -1 for none."""


@pytest.fixture(params=[COPY_MOVES, 0], ids=["read in place", "copied"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Read the five resident adapters where they lie, or copy the three of a step out of them."""
    monkeypatch.setattr(kernels, "COPY_MOVES", request.param)


def adapters(slots: list[int], order: list[int]) -> LayerAdapters:
    """Return the adapters of tokens in a step with the adapters `order`."""
    place = [order.index(slot) if slot >= 0 else -1 for slot in slots]
    tokens = TokenAdapters(jnp.asarray(order, jnp.int32), jnp.asarray(place, jnp.int32))
    return LayerAdapters({"q": PAIR}, jnp.int32(LAYER), tokens)


def added(slots: list[int], order: list[int]) -> np.ndarray:
    return np.asarray(with_adapters(jnp.asarray(BASE), jnp.asarray(ROWS), "q", adapters=adapters(slots, order)))


def test_each_token_takes_its_own_adapter():
    found = added(SLOTS, [0, 3, 4])
    for t, slot in enumerate(SLOTS):
        wanted = BASE[t].astype(np.float64)
        if slot >= 0:
            a_RI, b_RO = (np.asarray(stack[LAYER, slot], np.float64) for stack in PAIR)
            wanted = wanted + (a_RI @ ROWS[t]) @ b_RO
        np.testing.assert_allclose(found[t], wanted, rtol=1e-5, atol=1e-5)


def test_bits_depend_neither_on_other_adapters_of_the_step_nor_on_their_order():
    found = added(SLOTS, [0, 3, 4])
    np.testing.assert_array_equal(added(SLOTS, [4, 0, 3]), found)
    for t, slot in enumerate(SLOTS):
        alone = [slot if other == t else -1 for other in range(T)]
        others = [each for each in range(S) if each != slot]
        np.testing.assert_array_equal(added(alone, [*others[:2], max(slot, 0)])[t], found[t])


def test_tokens_without_an_adapter_keep_their_bits():
    found = added(SLOTS, [0, 3, 4])
    without = [t for t, slot in enumerate(SLOTS) if slot < 0]
    np.testing.assert_array_equal(found[without], BASE[without])
    assert (found[[t for t in range(T) if t not in without]] != BASE[[t for t in range(T) if t not in without]]).any()


def test_a_matrix_that_adapters_never_change_is_left_alone():
    found = with_adapters(jnp.asarray(BASE), jnp.asarray(ROWS), "k", adapters=adapters(SLOTS, [0, 3, 4]))
    np.testing.assert_array_equal(found, BASE)
    np.testing.assert_array_equal(with_adapters(jnp.asarray(BASE), jnp.asarray(ROWS), "q", adapters=None), BASE)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_latent_products_read_the_matrix_both_ways(num_heads: int):
    """Keys and values of heads are B A c for a latent c: queries use A^T B^T q, attended latents B A c."""
    of_tokens, width = adapters(SLOTS, [0, 3, 4]), O // num_heads
    queries, latents = drawn(T, num_heads, width, seed=5), drawn(T, num_heads, I, seed=6)
    nothing = jnp.zeros((T, num_heads, I), jnp.float32)
    absorbed = np.asarray(with_absorbed(nothing, jnp.asarray(queries), "q", adapters=of_tokens))
    no_values = jnp.zeros((T, num_heads, width), jnp.float32)
    expanded = np.asarray(with_expanded(no_values, jnp.asarray(latents), "q", adapters=of_tokens))
    for t, slot in enumerate(SLOTS):
        if slot < 0:
            assert not absorbed[t].any() and not expanded[t].any()
            continue
        a_RI, b_RO = (np.asarray(stack[LAYER, slot], np.float64) for stack in PAIR)
        whole_HwI = (b_RO.T @ a_RI).reshape(num_heads, width, I)
        np.testing.assert_allclose(absorbed[t], np.einsum("hw,hwi->hi", queries[t], whole_HwI), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(expanded[t], np.einsum("hi,hwi->hw", latents[t], whole_HwI), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_used", "rank", "expected"),
    [(8, 64, 8), (8, 8, 24), (2, 16, 6), (4, 32, 8), (1, 512, 1)],
)
def test_all_resident_adapters_are_read_where_copies_cost_more(num_used: int, rank: int, expected: int):
    """Their bytes are at most those of the copies, and their ranks fit a matrix unit."""
    if kernels.COPY_MOVES:
        assert kernels.max_read_in_place(num_used, rank) == expected
