"""Our own paged attention is that of the reference, over rows that lie flat, and sees no page beyond its reach."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu.packed_rows import gather_heads, layout_of, packed_kv, packed_width, spread_queries
from rayserve_moe.kernels.tpu.paged_attention import attend, visits_of
from rayserve_moe.kernels.tpu.paged_sizes import MAX_ROWS, tile_queries_for
from tests.support.kernels.interpreter import run_cases
from tests.support.kernels.paged_attention import AHEAD_OF_THE_LAST, CASES, FAULTS, MODELS, WRITE_FAULTS

MODULE = "tests.support.kernels.paged_attention"
SUMS_IN_FLOAT32, ROUNDING = 3e-6, 2**-7
"""Largest differences of products in float32, and in bfloat16: weights and results are rounded."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("num_kv", "width", "lanes"), [(8, 64, 1024), (1, 64, 256), (4, 128, 1024), (3, 80, 768)])
def test_a_head_of_a_flat_row_is_multiplied_with_its_own_queries_alone(num_kv, width, lanes):
    """The scores and values that lanes give are those of heads, and heads of 64 and of 128 leave no lane unused."""
    generator = np.random.default_rng(width)
    num_heads = 4 * num_kv
    queries = generator.standard_normal((2, 3, num_heads, width)).astype(np.float32)
    keys, values = (generator.standard_normal((5, num_kv, width)).astype(np.float32) for _ in range(2))
    rows, layout = packed_kv(jnp.asarray(keys), jnp.asarray(values)), layout_of(lanes, width)
    assert rows.shape == (5, lanes) and packed_width(num_kv, width, width) == lanes
    spread = np.asarray(spread_queries(jnp.asarray(queries), layout))
    weighted = []
    for i in range(layout.num_sets):
        own_keys, own_values = (np.asarray(rows[:, part]) for part in layout.lanes_of(i))
        weighted.append(spread[:, i] @ own_keys.T @ own_values)
    found = gather_heads(jnp.asarray(np.stack(weighted, axis=1)), layout, width=width)
    of_head = np.arange(num_heads) // 4
    expected = np.einsum("BQHh,THh,THv->BQHv", queries, keys[:, of_head], values[:, of_head])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="heads of 128 with values of 128 do not lie in rows of 640"):
        layout_of(640, 128)
    with pytest.raises(ValueError, match="latents of 100 of 192 elements do not lie in rows of 256"):
        layout_of(256, 192, latent_width=100)
    with pytest.raises(ValueError, match="2 query heads of 32 do not divide by the KV heads that fill registers"):
        spread_queries(jnp.zeros((1, 1, 2, 32)), layout_of(256, 32))
    table, positions = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="a pool of float32 in pages of 8 keys"):
        attend(jnp.zeros((1, 1, 2, 128)), jnp.zeros((9, 8, 256)), BlockPlaces(table, positions))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [FULL_CAUSAL, ScoreConfig(window=7)])
def test_visits_see_what_any_of_their_queries_sees(config):
    positions = np.array([[-1, -1, -1, -1], [4, 5, 6, 7], [30, -1, -1, -1], [-1, -1, -1, -1]], np.int32)
    for size in (1, 2, 4):
        first, end, filled = map(np.asarray, visits_of(jnp.asarray(positions), config, tile_queries=size))
        for visit, tile in enumerate(positions.reshape(-1, size)):
            seen = {
                key for query in tile if query >= 0 for key in range(query + 1) if query - key < config.window or 99
            }
            if config.window:
                seen = {key for query in tile for key in range(query + 1) if query - key < config.window}
            assert set(range(first[visit], end[visit])) == seen
            later = [other for other in range(visit, len(end)) if end[other] > 0]
            assert filled[visit] == min(later, default=len(end))


def test_tiles_are_whole_registers_and_all_of_a_block():
    for num_queries, rows in ((32, 16), (32, 128), (32, 40), (1, 128), (5, 300), (32, 100)):
        size = tile_queries_for(num_queries, rows)
        assert num_queries % size == 0 and (size == num_queries or (size * rows % 16 == 0 and size * rows <= MAX_ROWS))


@pytest.mark.slow
def test_it_is_the_reference_with_every_knob():
    """Whatever stands out of sight is NaN; no copy races with what reads it."""
    for name, found in run_cases(MODULE, *CASES).items():
        bound = ROUNDING * found.largest if CASES[name].dtype == "bfloat16" else SUMS_IN_FLOAT32
        assert found.difference <= bound < found.largest and not (found.has_races or found.has_rest), (name, found)


@pytest.mark.slow
def test_an_engine_gives_the_log_probs_of_the_reference():
    """Of a model with sinks and windows and of one with latents, for prompts in chunks and single tokens."""
    for name, found in run_cases(MODULE, *MODELS).items():
        assert found.difference <= SUMS_IN_FLOAT32 and not (found.has_races or found.has_rest), (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, *WRITE_FAULTS])
def test_a_planted_fault_is_found(fault):
    """A race, or a number that is none or wrong."""
    (found,) = run_cases(MODULE, fault).values()
    assert found.error or found.has_races or not found.difference <= SUMS_IN_FLOAT32


@pytest.mark.slow
def test_a_race_is_found_in_whichever_call_it_is():
    """The interpreter keeps races of the last call alone, and an engine makes many."""
    (found,) = run_cases(MODULE, AHEAD_OF_THE_LAST).values()
    assert found.has_races and found.difference <= SUMS_IN_FLOAT32
