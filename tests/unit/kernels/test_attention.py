"""Paged attention equals dense softmax attention, whatever the pages look like. New kernels join by their name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.kv_pool import write_kv
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, KEYS_PER_SPAN, ScoreConfig
from tests.unit.kernels.attention_cases import KERNELS, Case

KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
CONFIGS = {
    "full": FULL_CAUSAL,
    "all": ScoreConfig(window=33, scale=-0.2, soft_cap=0.5),
}
MORE_CONFIGS = {
    "window": ScoreConfig(window=20),
    "window_of_one": ScoreConfig(window=1),
    "long_window": ScoreConfig(window=KEYS_PER_SPAN + 40),
    "scaled_and_capped": ScoreConfig(scale=0.7, soft_cap=1.5),
}
MORE = [pytest.param(config, id=name, marks=pytest.mark.slow) for name, config in MORE_CONFIGS.items()]
CONFIG = pytest.mark.parametrize(
    "config", [*(pytest.param(config, id=name) for name, config in CONFIGS.items()), *MORE]
)


@KERNEL
@pytest.mark.parametrize(
    ("page_size", "num_heads", "num_kv_heads"),
    [
        (3, 6, 2),
        (16, 6, 2),
        (KEYS_PER_SPAN + 32, 6, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 4, 4), (16, 3, 1), (KEYS_PER_SPAN, 4, 4))),
    ],
)
def test_it_is_dense_attention(kernel, page_size, num_heads, num_kv_heads):
    blocks = [(0, 1), (0, 5), (KEYS_PER_SPAN - 2, 5), (2 * KEYS_PER_SPAN + 9, 4)]
    case = Case(page_size=page_size, num_heads=num_heads, num_kv_heads=num_kv_heads, blocks=blocks)
    np.testing.assert_allclose(case.run(kernel), case.dense(), atol=3e-6)


@KERNEL
@CONFIG
@pytest.mark.parametrize(
    ("num_heads", "blocks"),
    [
        (6, [(0, 9), (40, 9), (47, 9), (KEYS_PER_SPAN - 2, 5), (2 * KEYS_PER_SPAN - 1, 9), (300, 1)]),
        (4, [(position, 1) for position in (0, 1, 15, 16, 47, 48, 49, 127, 128, 129, 191, 192, 300)]),
    ],
    ids=["blocks", "single queries"],
)
def test_configs_narrow_what_is_seen_and_shape_scores(kernel, config, num_heads, blocks):
    case = Case(page_size=16, num_heads=num_heads, num_kv_heads=2, blocks=blocks)
    np.testing.assert_allclose(case.run(kernel, config), case.dense(config), atol=3e-6)


@KERNEL
@CONFIG
def test_neighbouring_blocks_of_one_prompt_are_as_good_as_one(kernel, config):
    """The blocks of a chunk stand next to each other and share a page table; two chunks follow one another."""
    block, pages = 8, 12
    first = [*range(37, 37 + 6 * block, block), *range(0, 3 * block, block)]
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(start, block) for start in first])
    case.page_table = np.repeat(np.stack([np.arange(1, pages + 1), np.arange(20, pages + 20)]), (6, 3), axis=0)
    case.page_table = case.page_table.astype(np.int32) % len(case.pages)
    case.positions[5, 3:] = -1
    case.positions[8, 1:] = -1
    np.testing.assert_allclose(case.run(kernel, config), case.dense(config), atol=3e-6)


@KERNEL
def test_bfloat16_is_exact_but_for_the_last_rounding(kernel):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (140, 5)])
    case.pages, case.queries = (array.astype(jnp.bfloat16) for array in (case.pages, case.queries))
    # Half a step of a number with 8 significant bits, above what float32 sums add to it.
    np.testing.assert_allclose(case.run(kernel).astype(np.float32), case.dense(), rtol=2**-8, atol=1e-5)


@KERNEL
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_8_bit_pages_are_read_exactly(kernel, dtype):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (140, 5)])
    case.pages = case.pages.astype(dtype)
    np.testing.assert_allclose(case.run(kernel), case.dense(), atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_8_bit_pages_cost_less_than_the_rounding_of_one_number(dtype):
    """Rounding errors of many keys and values average out: that of one number, at most 6.25 or
    12.5 %, bounds what outputs lose in the root mean square."""
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (140, 5)])
    exact = case.dense()
    case.pages = case.pages.astype(dtype)
    error = case.run(KERNELS["reference"]) - exact
    most = float(jnp.finfo(dtype).eps) / 2
    assert np.sqrt(np.mean(error**2)) <= most * np.sqrt(np.mean(exact**2))


def test_what_8_bits_cannot_hold_becomes_the_largest_number():
    pages, slots = jnp.zeros((1, 2, 1, 8), jnp.float8_e4m3fn), jnp.array([1], jnp.int32)
    written = write_kv(pages, jnp.full((1, 1, 4), 1e6), jnp.full((1, 1, 4), -500.0), slots).astype(np.float32)
    np.testing.assert_array_equal(written[0, 1], [[448.0] * 4 + [-448.0] * 4])


def test_a_config_refuses_negative_numbers():
    for name in ("window", "soft_cap"):
        with pytest.raises(ValueError, match=f"attention {name} must not be negative"):
            ScoreConfig(**{name: -1})


@KERNEL
@pytest.mark.parametrize("length", [5, 1])
def test_padding_gives_zeros_and_costs_others_nothing(kernel, length):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(40, length), (7, length), (3, 1), (9, length)])
    before = case.run(kernel)
    case.positions[[0, 1]] = -1
    after = case.run(kernel)
    assert (after[:2] == 0).all() and (after[2, 1:] == 0).all()
    np.testing.assert_array_equal(after[2:], before[2:])
    case.positions[:] = -1
    assert (case.run(kernel) == 0).all()


@KERNEL
def test_a_block_does_not_depend_on_its_company(kernel):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (300, 5)])
    together = case.run(kernel)[0]
    case.positions[1] = -1
    np.testing.assert_array_equal(case.run(kernel)[0], together)


@KERNEL
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_earlier_owners_left_in_a_page_is_without_effect(kernel, garbage):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (0, 1), (140, 2)])
    clean = case.run(kernel)
    held = np.zeros(case.pages.shape[:2], bool)
    for block, reach in enumerate(case.positions.max(axis=1)):
        page, offset = np.divmod(np.arange(reach + 1), 16)
        held[case.page_table[block, page], offset] = True
    case.pages[~held] = garbage
    np.testing.assert_array_equal(case.run(kernel), clean)


def test_pages_out_of_reach_may_belong_to_others():
    config = ScoreConfig(window=20)
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(150, 5), (200, 5)])
    kernel = KERNELS["reference"]
    clean = case.run(kernel, config)
    for block in range(2):
        first = int(np.asarray(config.first_key(jnp.asarray(case.positions[block, 0]))))
        case.pages[case.page_table[block, : first // 16]] = np.nan
    np.testing.assert_array_equal(case.run(kernel, config), clean)


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else():
    generator = np.random.default_rng(3)
    pages = generator.standard_normal((5, 4, 3, 5)).astype(np.float32)
    keys, values = (generator.standard_normal((7, 3, width)).astype(np.float32) for width in (2, 3))
    slots = np.array([4, 19, 8, 9, 10, 0, 0], np.int32)
    written = np.asarray(write_kv(jnp.asarray(pages), jnp.asarray(keys), jnp.asarray(values), jnp.asarray(slots)))
    flat, old = written.reshape(20, 3, 5), pages.reshape(20, 3, 5)
    for token, slot in enumerate(slots[:5]):
        np.testing.assert_array_equal(flat[slot, :, :2], keys[token])
        np.testing.assert_array_equal(flat[slot, :, 2:], values[token])
    others = np.setdiff1d(np.arange(20), slots)
    np.testing.assert_array_equal(flat[others], old[others])
