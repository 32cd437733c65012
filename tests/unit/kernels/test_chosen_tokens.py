"""The kernels of sparse attention choose and attend as the reference, and read no row beyond a token's own."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.tpu.chosen_attention import masked_tokens
from rayserve_moe.kernels.tpu.token_index import pages_of_a_block, unsupported_reason
from rayserve_moe.kernels.tpu.top_tokens import kept_lanes, ordered
from tests.support.kernels.chosen_tokens import CASES, FAULTS, INDEX_FAULTS, LAYERS, BlockCase, IndexCase, PromptCase
from tests.support.kernels.interpreter import run_cases

MODULE = "tests.support.kernels.chosen_tokens"
SUMS_IN_FLOAT32, ROUNDING = 3e-6, 2**-7
"""Largest differences of products in float32, and in bfloat16: weights and results are rounded."""


def test_ordered_scores_compare_as_scores_do():
    scores = np.float32([-np.inf, -3.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, np.inf])
    found = np.asarray(ordered(jnp.asarray(scores)))
    np.testing.assert_array_equal(found[:, None] < found, scores[:, None] < scores)
    assert (np.asarray(ordered(jnp.float32([np.nan, -np.nan]))) == found[-1]).all()


def test_blocks_of_keys_are_whole_rows_of_scores():
    for page_size in (16, 48, 128, 256, 4096):
        assert pages_of_a_block(page_size) * page_size % 128 == 0
    assert [kept_lanes(top_k) for top_k in (1, 128, 129, 2048, 2049)] == [128, 128, 256, 2048, 2304]


@dataclass
class Chip:
    mem_bw_bytes_per_second: float
    bf16_ops_per_second: float


@pytest.mark.parametrize(
    ("chip", "heads", "context"),
    [(Chip(1.3825e12, 229.5e12), 32, 59_000), (Chip(819e9, 197e12), 16, 170_000), (Chip(8e12, 918e12), 16, 478_000)],
)
def test_a_mask_is_left_where_copies_cost_less(monkeypatch, chip: Chip, heads: int, context: int):
    """Rates of v5p, of v5e, and of a chip limited by a core's copy requests."""
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: chip)
    found = masked_tokens(heads, 640, 512, top_k=2048)
    assert context < found < 1.03 * context
    assert abs(masked_tokens(2 * heads, 640, 512, top_k=2048) - found // 2) <= 1
    assert masked_tokens(heads, 640, 512, top_k=2048, interpret=True) > 1 << 30


@pytest.mark.parametrize(
    ("heads", "pages", "reason"),
    [(64, 8192, ""), (129, 1, "129 heads"), (64, 1 << 16, "scores of 8388608 tokens exceed 16 MiB")],
)
def test_sizes_that_do_not_fit_are_left_to_others(heads, pages, reason):
    queries, weights, pool = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, heads, 128), (1, 1, heads), (9, 128, 128))
    )
    table, positions = (jax.ShapeDtypeStruct((1, size), np.int32) for size in (pages, 1))
    found = unsupported_reason(queries, weights, pool, BlockPlaces(table, positions), top_k=2048)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.slow
def test_they_are_the_reference():
    """On equal scores the chosen sets are equal. Whatever stands out of sight is NaN; no copy races with a read."""
    for name, found in run_cases(MODULE, *CASES).items():
        case = CASES[name]
        bound = ROUNDING * found.largest if case.dtype == "bfloat16" else SUMS_IN_FLOAT32
        if isinstance(case, PromptCase | BlockCase) and case.dtype == "float32":
            bound = SUMS_IN_FLOAT32 * found.largest
        bound = 0 if isinstance(case, IndexCase) else bound
        assert found.difference <= bound < found.largest and not (found.has_races or found.has_rest), (name, found)


@pytest.mark.slow
def test_a_layer_is_that_of_the_reference_and_a_choice_does_not_depend_on_other_queries():
    """Single tokens and prompts, some within the choice; chosen sets are equal."""
    alone, layer = run_cases(MODULE, *LAYERS).values()
    assert alone.difference == 0 < alone.largest and not (alone.has_races or alone.has_rest), alone
    assert layer.difference <= SUMS_IN_FLOAT32 * layer.largest and not (layer.has_races or layer.has_rest), layer


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """A race, another token, or a number that is none or wrong."""
    (found,) = run_cases(MODULE, fault).values()
    bound = 0 if fault in INDEX_FAULTS else SUMS_IN_FLOAT32
    assert found.error or found.has_races or not found.difference <= bound
